"""The faults that an environment names: which come when, and what becomes of a run."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import islice
from statistics import fmean
from typing import Any

import pytest

from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, Membership, MembershipSettings, membership_of
from halos.core.messages import Push, Received, RunLocalSteps
from halos.core.server import Server, ServerSettings
from halos.core.tensors import NullState
from halos.core.topology import ROOT, Topology
from halos.errors import UserError
from halos.runtime.dispatcher import Step
from halos.runtime.plan import RunPlan
from halos.runtime.trace import TraceWriter
from halos.runtime.virtual import VirtualClock
from halos.simulation import through_servers
from halos.simulation.environment import Environment
from halos.simulation.experiment import Experiment, run_experiment
from halos.simulation.faults import Fault, FaultyRun, faults_of
from halos.simulation.methods import method_of

FLAKY = Environment.load("flaky-spot")
HOUR_S = 3_600.0


def environment(**given: Any) -> Environment:
    return Environment.model_validate(
        {
            "name": "tried",
            "step_ms": 500,
            "model_bytes": 10_000_000,
            "root_region": "us",
            "regions": [{"name": "us", "workers": 3}, {"name": "eu", "workers": 2}],
            "bandwidth_gbps": [[100.0, 1.0], [1.0, 100.0]],
            **given,
        }
    )


def event(at_s: float, kind: str, who: str) -> dict[str, Any]:
    return {"at_s": at_s, "kind": kind, "who": who}


def planned(*events: dict[str, Any]) -> Environment:
    return environment(events=events)


class Tried:
    """A run of ``samples`` in an environment, timing only."""

    def __init__(
        self, environment: Environment, topology: Topology | None = None, *, samples: int = 20_000
    ) -> None:
        self.environment = environment
        self.topology = topology or environment.tree()
        self.samples = samples
        settings = ServerSettings(
            leasing=LeasingSettings(batch_size=8, local_steps_of=self.topology.local_steps(8)),
            accumulation=6,
        )
        self.plan = RunPlan(
            topology=self.topology,
            identity=Identity(run="run", model="model", datasets=("text",)),
            membership=MembershipSettings(),
            samples={"text": samples},
            server_settings=lambda _: settings,
            tensors=lambda _: NullState(),
        )
        self.clock = VirtualClock(self.plan.nodes(), environment.model_of(self.topology))
        self.trace = io.StringIO()
        self.rounds: list[tuple[float, str]] = []  # when each begins, and whose
        self.told: list[tuple[float, str, str]] = []
        self.clock.observers += [TraceWriter(self.trace), self._note]
        self.clock.start()
        self.faulty = FaultyRun(
            self.clock,
            self.plan,
            self.topology,
            ended=lambda worker: self.told.append((self.clock.now, "ended", worker)),
            reborn=lambda worker: self.told.append((self.clock.now, "reborn", worker)),
        )

    def _note(self, step: Step) -> None:
        if any(isinstance(effect, RunLocalSteps) for effect in step.effects):
            self.rounds.append((step.time, step.node))

    def run(self, *, seed: int = 0, **given: Any) -> bool:
        faults = faults_of(self.environment, self.topology, seed)
        return self.faulty.run(faults, **given)

    def began(self, worker: str) -> list[float]:
        return [at for at, name in self.rounds if name == worker]

    @property
    def credited(self) -> int:
        root = self.clock.nodes[ROOT]
        assert isinstance(root, Server)
        return root.state.leasing.ledger.credited.total

    def members(self, server: str) -> set[str]:
        membership = self.clock.nodes[membership_of(server)]
        assert isinstance(membership, Membership)
        return set(membership.state.members)


def by_name(faults: Iterable[Fault], who: str) -> list[Fault]:
    return [fault for fault in faults if fault.who == who]


# ---------------------------------------------------------------- which come when


def test_what_is_planned_comes_in_order_of_time_then_as_written() -> None:
    flaky = planned(event(9, "mend", "eu"), event(5, "kill", "us/1"), event(5, "cut", "eu"))
    assert list(faults_of(flaky, flaky.tree(), seed=0)) == [
        Fault(5, "kill", "us/1"),
        Fault(5, "cut", "eu"),
        Fault(9, "mend", "eu"),
    ]


def test_a_pattern_stands_for_several() -> None:
    everybody = planned(event(1, "kill", "us/*"), event(2, "kill", "*"), event(3, "cut", "*"))
    assert [(f.kind, f.who) for f in faults_of(everybody, everybody.tree(), seed=0)] == [
        ("kill", "us/0"),
        ("kill", "us/1"),
        ("kill", "us/2"),
        ("kill", "us"),
        ("kill", "eu"),
        ("cut", "eu"),  # that of the root's own region leads nowhere
    ]


def test_without_local_servers_a_region_is_cut_off_worker_by_worker() -> None:
    star = planned(event(1, "kill", "eu"), event(2, "cut", "eu"), event(3, "kill", "us/0"))
    assert list(faults_of(star, star.star(), seed=0)) == [
        Fault(2, "cut", "eu/0"),
        Fault(2, "cut", "eu/1"),
        Fault(3, "kill", "us/0"),
    ]


def test_who_joins_is_absent_until_then() -> None:
    later = planned(
        event(60, "join", "eu/1"), event(30, "leave", "us/0"), event(90, "join", "us/0")
    )
    assert list(faults_of(later, later.tree(), seed=0))[:2] == [
        Fault(0, "leave", "eu/1"),
        Fault(30, "leave", "us/0"),
    ]


def flaky(seed: int, count: int) -> list[Fault]:
    return list(islice(faults_of(FLAKY, FLAKY.tree(), seed), count))


def test_random_faults_are_endless_in_order_and_the_seeds_alone() -> None:
    once = flaky(seed=3, count=2_000)
    assert [fault.at_s for fault in once] == sorted(fault.at_s for fault in once)
    assert flaky(seed=3, count=2_000) == once
    assert flaky(seed=3, count=1_000) == once[:1_000]
    assert {fault.at_s for fault in flaky(seed=4, count=1_000)}.isdisjoint(
        fault.at_s for fault in once
    )


def test_who_fails_when_does_not_depend_on_who_else_is_there() -> None:
    smaller = FLAKY.model_copy(update={"regions": FLAKY.regions[:3]})
    mine = by_name(islice(faults_of(smaller, smaller.tree(), seed=3), 500), "us/1")
    assert mine == by_name(flaky(seed=3, count=2_000), "us/1")[: len(mine)]
    assert len(mine) > 10


def test_spot_machines_die_every_20_minutes_and_are_back_after_two() -> None:
    lives, away = [], []
    faults = flaky(seed=0, count=20_000)
    for worker in FLAKY.workers:
        mine = by_name(faults, worker)
        assert [fault.kind for fault in mine[:4]] == ["kill", "return", "kill", "return"]
        lives += [b.at_s - a.at_s for a, b in zip(mine[1::2], mine[2::2], strict=False)]
        away += [b.at_s - a.at_s for a, b in zip(mine[::2], mine[1::2], strict=False)]
    assert fmean(lives) == pytest.approx(1_200, rel=0.05)
    assert away == pytest.approx([120] * len(away))


def test_every_link_is_down_two_per_cent_of_the_time() -> None:
    faults = flaky(seed=0, count=40_000)
    for region in ("us", "eu", "ap"):
        mine = by_name(faults, region)
        assert {fault.kind for fault in mine} == {"cut", "mend"}
        down = [b.at_s - a.at_s for a, b in zip(mine[::2], mine[1::2], strict=False)]
        assert fmean(down) == pytest.approx(30, rel=0.15)
        assert sum(down) / faults[-1].at_s == pytest.approx(0.02, rel=0.15)
    assert not by_name(faults, "home")


# ---------------------------------------------------------------- what becomes of a run


def test_a_worker_is_away_from_its_death_to_its_return() -> None:
    run = Tried(planned(event(20, "kill", "us/1"), event(90, "return", "us/1")))
    assert run.run()
    mine = run.began("us/1")
    assert [at for at in mine if 20 <= at < 90] == []
    assert min(mine) < 20
    assert 90 <= min(at for at in mine if at > 20) < 95
    assert run.told == [(20, "ended", "us/1"), (90, "reborn", "us/1")]
    assert any(20 < at < 90 for at in run.began("us/0"))
    assert run.credited == run.samples


def test_a_worker_that_joins_is_not_there_before() -> None:
    run = Tried(planned(event(40, "join", "eu/0")))
    assert run.run()
    assert 40 <= min(run.began("eu/0")) < 45
    assert run.told == [(0, "ended", "eu/0"), (40, "reborn", "eu/0")]
    assert run.credited == run.samples


def test_who_leaves_says_goodbye_and_who_is_killed_is_missed_only_later() -> None:
    run = Tried(planned(event(22, "leave", "us/0"), event(22, "kill", "us/1")))
    assert not run.run(until=22)
    assert run.members("us") == {"us/1", "us/2"}
    assert not run.run(until=60)
    assert run.members("us") == {"us/2"}


def test_who_leaves_while_cut_off_cannot_say_so() -> None:
    run = Tried(planned(event(20, "cut", "us/0"), event(22, "leave", "us/0")))
    assert not run.run(until=22)
    assert "us/0" in run.members("us")


def test_the_dead_who_leave_do_not_return() -> None:
    run = Tried(
        planned(event(9, "kill", "us/0"), event(20, "leave", "us/0"), event(30, "return", "us/0"))
    )
    assert run.run()
    assert max(run.began("us/0")) < 9


def test_nothing_happens_twice() -> None:
    run = Tried(
        planned(
            event(10, "return", "us/0"),
            event(20, "kill", "us/0"),
            event(25, "kill", "us/0"),
            event(40, "return", "us/0"),
            event(45, "return", "us/0"),
        )
    )
    assert run.run()
    assert run.told == [(20, "ended", "us/0"), (40, "reborn", "us/0")]


def test_a_region_that_is_cut_off_works_on() -> None:
    run = Tried(planned(event(20, "cut", "eu"), event(80, "mend", "eu")))
    pushed: list[float] = []

    def note(step: Step) -> None:
        match step.event:
            case Received("eu", Push()):
                pushed.append(step.time)

    run.clock.observers.append(note)
    assert run.run()
    assert any(at < 20 for at in pushed)
    assert not any(20 <= at < 80 for at in pushed)
    assert any(80 <= at < 100 for at in pushed)
    assert any(20 < at < 80 for at in run.began("eu/0"))
    assert run.credited == run.samples


def test_a_local_server_that_died_starts_from_the_roots_model() -> None:
    run = Tried(planned(event(30, "kill", "eu"), event(100, "return", "eu")))
    assert not run.run(until=29)
    old = run.clock.nodes["eu"]
    assert run.run()
    new = run.clock.nodes["eu"]
    assert isinstance(new, Server) and new is not old
    assert new.state.version > 0
    assert [at for at in run.began("eu/0") if at > 100]
    assert not run.told  # no worker died
    assert run.credited == run.samples


@pytest.mark.parametrize("shape", ["tree", "star"])
def test_a_run_on_spot_machines_ends_with_every_sample_credited(shape: str) -> None:
    topology = FLAKY.tree() if shape == "tree" else FLAKY.star()
    run = Tried(FLAKY, topology, samples=250_000)
    assert run.run(until=10 * HOUR_S)
    assert len([told for told in run.told if told[1] == "ended"]) > 5
    assert run.credited == run.samples


def test_the_same_seed_has_the_same_trace_and_another_has_not() -> None:
    traces = []
    for seed in (1, 1, 2):
        run = Tried(FLAKY, samples=100_000)
        assert run.run(seed=seed)
        traces.append(run.trace.getvalue())
    assert traces[0] == traces[1] != traces[2]


def test_a_run_without_faults_is_driven_to_its_end() -> None:
    calm = Tried(environment())
    assert calm.run()
    plain = Tried(environment())
    assert plain.clock.run()
    assert calm.trace.getvalue() == plain.trace.getvalue()
    assert not calm.environment.has_faults


# ---------------------------------------------------------------- limits


def test_a_limit_of_time_is_kept_and_can_be_exceeded_later() -> None:
    run = Tried(planned(event(10, "kill", "us/0"), event(50, "return", "us/0")))
    assert not run.run(until=30)
    assert run.clock.now == 30
    assert run.told == [(10, "ended", "us/0")]


def test_whoever_is_asked_on_the_way_may_end_it() -> None:
    run = Tried(planned(event(10, "kill", "us/0"), event(50, "return", "us/0")))
    asked: list[float] = []

    def tick() -> bool:
        asked.append(run.clock.now)
        return run.clock.now < 30

    assert not run.run(tick=tick)
    assert 30 <= run.clock.now < 50
    assert asked == sorted(asked) and len(asked) > 2


def test_a_clock_that_is_stopped_suffers_nothing_more() -> None:
    run = Tried(planned(event(10, "kill", "us/0")))
    run.clock.stop()
    assert not run.run()
    assert not run.told


def test_time_passes_for_those_who_return_when_all_are_dead() -> None:
    run = Tried(
        planned(
            event(10, "kill", "*"),
            event(10, "kill", "*/*"),
            event(2_500, "kill", "us/0"),
            event(5_000, "return", "*"),
            event(5_000, "return", "*/*"),
        )
    )
    assert run.run(until=HOUR_S * 3)
    assert min(at for at in run.began("us/0") if at > 10) > 5_000
    assert run.credited == run.samples


def test_a_run_that_comes_to_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through_servers, "STALL_S", HOUR_S)
    deserted = environment(events=[event(60, "leave", "*/*")])
    experiment = Experiment(deserted, method_of("halos:k=1000"), local_steps=10**6)
    with pytest.raises(UserError, match="nothing reached the root for"):
        run_experiment(experiment)
