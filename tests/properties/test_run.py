"""Whatever a network and machines do: no sample is counted twice, and the run comes to its end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.properties.world import THREE_TIERS, TWO_TIERS, World, process_of

PICK = st.integers(0, 2**16)
THEN = st.integers(0, 4)  # rounds in which all goes well, after something that did not


def pick(choices: Sequence[str], number: int) -> str:
    return choices[number % len(choices)]


class Run(RuleBasedStateMachine):
    """Workers, links and processes fail and return; the operator and time interfere."""

    world: World
    well = False

    @initialize(
        tree=st.sampled_from([TWO_TIERS, THREE_TIERS]),
        samples=st.sampled_from([24, 60, {"a": 33, "b": 40}]),
        in_flight=st.sampled_from(["carry", "drop"]),
        lease_block=st.sampled_from([None, 0, 3]),
        accumulation=st.sampled_from([1, 2, 4]),
        merge_weight=st.sampled_from([0.25, 1.0]),
    )
    def begin(self, tree: dict[str, str | None], **settings: object) -> None:
        self.world = World(tree, **settings)  # type: ignore[arg-type]
        self.world.settle()
        self.others = [name for name in tree if name != "root"]

    # ------------------------------------------------------------ the network

    @precondition(lambda self: self.world.deliverable())
    @rule(numbers=st.lists(PICK, min_size=1, max_size=8), settle=st.booleans())
    def deliver(self, numbers: list[int], settle: bool) -> None:
        """Some messages arrive, in any order."""
        for number in numbers:
            if choices := self.world.deliverable():
                index = choices[number % len(choices)]
                to = process_of(self.world.network[index].to)
                self.world.deliver(index)
                if settle:
                    self.world.settle([to])

    @rule(number=PICK, then=THEN)
    def repeat(self, number: int, then: int) -> None:
        if (index := self.world.one_of_a_kind(number)) is not None:
            self.world.repeat(index)
        self.world.work(then)

    @rule(number=PICK, then=THEN)
    def delay(self, number: int, then: int) -> None:
        if (index := self.world.one_of_a_kind(number)) is not None:
            self.world.delay(index)
        self.world.work(then)

    @precondition(lambda self: self.world.late)
    @rule(number=PICK, then=THEN)
    def arrive_late(self, number: int, then: int) -> None:
        self.world.arrive_late(number % len(self.world.late))
        self.world.work(then)

    @rule(number=PICK, then=THEN)
    def drop(self, number: int, then: int) -> None:
        if (index := self.world.one_of_a_kind(number)) is not None:
            self.world.drop(index)
        self.world.work(then)

    @precondition(lambda self: self.world.unnoticed)
    @rule(number=PICK, then=THEN)
    def notice_loss(self, number: int, then: int) -> None:
        self.world.notice_loss(number % len(self.world.unnoticed))
        self.world.work(then)

    @rule(number=PICK, lossy=st.booleans(), then=THEN)
    def cut_link(self, number: int, lossy: bool, then: int) -> None:
        self.world.cut_link(pick(self.others, number), lossy=lossy)
        self.world.work(then)

    @precondition(lambda self: self.world.cut)
    @rule(number=PICK, then=THEN)
    def mend_link(self, number: int, then: int) -> None:
        self.world.mend_link(pick(sorted(self.world.cut), number))
        self.world.work(then)

    # ------------------------------------------------------------ work

    @precondition(lambda self: self.world.jobs)
    @rule(numbers=st.lists(PICK, min_size=1, max_size=4), finite=st.booleans())
    def finish_rounds(self, numbers: list[int], finite: bool) -> None:
        for number in numbers:
            if self.world.jobs:
                worker = pick(sorted(self.world.jobs), number)
                self.world.finish_round(worker, finite=finite)
                self.world.settle([worker])

    @rule(rounds=st.integers(1, 12))
    def all_goes_well(self, rounds: int) -> None:
        """For a while, for those who are not cut off."""
        self.world.work(rounds)

    @rule(number=PICK)
    def handle_one(self, number: int) -> None:
        inbox, frozen = self.world.inbox, self.world.frozen
        if waiting := [n for n in inbox if inbox[n] and process_of(n) not in frozen]:
            self.world.handle(pick(waiting, number))

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]), heartbeats=st.booleans(), then=THEN)
    def time_passes(self, seconds: float, heartbeats: bool, then: int) -> None:
        self.world.wait(seconds, heartbeats=heartbeats)
        self.world.work(then)

    # ------------------------------------------------------------ machines and people

    @rule(number=PICK, then=THEN)
    def kill_worker(self, number: int, then: int) -> None:
        if alive := [n for n in self.world.workers if self.world.alive(n)]:
            self.world.kill(pick(alive, number))
        self.world.work(then)

    @rule(number=PICK, keep=st.booleans(), then=THEN)
    def restart_worker(self, number: int, keep: bool, then: int) -> None:
        self.world.restart(pick(self.world.workers, number), keep=keep)
        self.world.work(then)

    @rule(number=PICK)
    def save(self, number: int) -> None:
        if alive := [n for n in self.world.tree if self.world.alive(n)]:
            self.world.save(pick(alive, number))

    @rule(number=PICK, then=THEN)
    def freeze(self, number: int, then: int) -> None:
        if alive := [n for n in self.world.tree if self.world.alive(n)]:
            self.world.frozen.add(pick(alive, number))
        self.world.work(then)

    @precondition(lambda self: self.world.frozen)
    @rule(number=PICK)
    def thaw(self, number: int) -> None:
        self.world.frozen.discard(pick(sorted(self.world.frozen), number))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_is_well(self) -> None:
        self.well = False
        self.world.check()
        self.well = True

    def teardown(self) -> None:
        if self.well:
            self.world.heal(self.stays_away())

    def stays_away(self) -> list[str]:
        return []


class RunWithMemoryLoss(Run):
    """Servers lose what they knew as well, are evicted, given up, and gone for good."""

    @rule(number=PICK, then=THEN)
    def kill_server(self, number: int, then: int) -> None:
        servers = [n for n in self.world.servers if n != "root" and self.world.alive(n)]
        if servers:
            self.world.kill(pick(servers, number))
        self.world.work(then)

    @rule(number=PICK, keep=st.booleans(), then=THEN)
    def restart_server(self, number: int, keep: bool, then: int) -> None:
        self.world.restart(pick(self.world.servers, number), keep=keep)
        self.world.work(then)

    @rule(number=PICK, then=THEN)
    def evict(self, number: int, then: int) -> None:
        self.world.evict(pick(self.others, number))
        self.world.work(then)

    @rule(seconds=st.sampled_from([21.0, 70.0]), heartbeats=st.booleans(), then=THEN)
    def much_time_passes(self, seconds: float, heartbeats: bool, then: int) -> None:
        self.world.wait(seconds, heartbeats=heartbeats)
        self.world.work(then)

    def stays_away(self) -> list[str]:
        """Who is dead by now stays so, if somebody is left to do the work."""
        dead = [n for n in self.world.tree if not self.world.alive(n)]
        away = self.world.with_descendants(dead)
        return dead if set(self.world.workers) - away else []


FAST = settings(
    max_examples=100,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
THOROUGH = settings(
    max_examples=1000,
    stateful_step_count=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("machine", [Run, RunWithMemoryLoss])
def test_no_sample_is_counted_twice_and_all_are_in_the_end(machine: type[Run]) -> None:
    run_state_machine_as_test(machine, settings=FAST)  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [Run, RunWithMemoryLoss])
def test_the_same_at_length(machine: type[Run]) -> None:
    run_state_machine_as_test(machine, settings=THOROUGH)  # type: ignore[no-untyped-call]
