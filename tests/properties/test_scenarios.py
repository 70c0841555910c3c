"""What may befall a run, told as stories: from the first fault to the end of the run."""

from __future__ import annotations

import pytest

from halos.core.ranges import RangeSet
from tests.properties.world import DRAIN_TIMEOUT_S, THREE_TIERS, World, positions

MODES = ["drop", "carry"]


def begun(mode: str = "drop") -> World:
    """A run of some updates and pushes."""
    world = World(THREE_TIERS, in_flight=mode, samples=400, lease_block=40)
    world.settle()
    world.work(10)
    return world


def delivered(world: World) -> RangeSet:
    return world.server("root").state.leasing.ledger.delivered


def done_at(world: World, server: str) -> set[int]:
    """What this server applied and has not delivered yet."""
    state = world.server(server).state
    pushed = state.push.report.contained if state.push is not None else ()
    return positions(state.pending.contained) | positions(pushed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("region", ["us", "eu", "rack"])
def test_work_of_an_outage_is_delivered_by_the_push_that_is_cut_again(
    mode: str, region: str
) -> None:
    world = begun(mode)
    world.cut_link(region, lossy=True)
    world.work(20)
    done = done_at(world, region)
    assert len(done) >= 8
    world.mend_link(region)
    while world.unnoticed:
        world.notice_loss(0)
    world.work(8)
    world.heal()
    assert done <= positions(delivered(world))
    assert not world.memory_lost


@pytest.mark.parametrize("mode", MODES)
def test_so_is_the_work_done_while_an_answer_was_lost(mode: str) -> None:
    world = begun(mode)
    while not any(type(p.message).__name__ == "PushAnswer" for p in world.network):
        world.finish_round(min(world.jobs))
        world.settle()
        for i in reversed(range(len(world.network))):
            if type(world.network[i].message).__name__ != "PushAnswer":
                world.deliver(i)
        world.settle()
    answered = next(p.to for p in world.network if type(p.message).__name__ == "PushAnswer")
    world.cut_link(answered, lossy=True)
    world.work(20)
    done = done_at(world, answered)
    world.heal()
    assert done <= positions(delivered(world))


def test_a_region_that_is_set_back_and_goes_on_alone_is_not_taken_for_having_pushed() -> None:
    world = begun()
    world.save("us")
    world.work(10)  # pushes on, beyond what was saved
    world.cut_link("us", lossy=True)
    world.restart("us", keep=True)
    world.work(10)
    world.heal()


@pytest.mark.parametrize("keep", [True, False])
def test_all_workers_die_and_come_back(keep: bool) -> None:
    world = begun()
    for worker in world.workers:
        world.save(worker)
        world.kill(worker)
    world.wait(50, heartbeats=True)
    for worker in world.workers:
        world.restart(worker, keep=keep)
    world.heal()
    assert not world.memory_lost


def test_a_region_that_lost_its_workers_for_good_delivers_what_they_did() -> None:
    """and what it still holds is given to others when its time is over"""
    world = begun("carry")
    done = done_at(world, "us")
    world.kill("us/0")
    before = world.now
    world.heal(gone=["us/0"])
    assert done <= positions(delivered(world))
    assert world.now < before + 5 * DRAIN_TIMEOUT_S


@pytest.mark.parametrize("gone", [["us"], ["eu"], ["rack"], ["rack", "us"]])
def test_branches_that_are_gone_for_good_hold_the_end_up_for_their_time_only(
    gone: list[str],
) -> None:
    world = begun()
    before = world.now
    world.heal(gone)
    assert world.now < before + 10 * DRAIN_TIMEOUT_S


def test_an_evicted_region_starts_again_from_the_current_model() -> None:
    world = begun()
    world.evict("eu")
    world.settle()
    held = world.server("root").state.leasing.ledger.held
    assert not positions(held.get("eu", ()))
    world.heal()


def test_a_root_that_is_set_back_goes_on_from_there() -> None:
    world = begun()
    world.save("root")
    world.work(20)
    world.restart("root", keep=True)
    world.heal()


def test_a_run_that_ends_while_a_region_is_away_tells_it_when_it_is_back() -> None:
    world = begun("carry")
    world.cut_link("us", lossy=True)
    for _ in range(400):
        world.work(1)
        world.wait(4, heartbeats=True)
        if world.over("root"):
            break
    assert world.over("root")
    assert not world.over("us")
    world.heal()
    assert world.over("us")
