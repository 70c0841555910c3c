"""Whatever a network and machines do: no sample is counted twice, and the run comes to its end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.properties.world import THREE_TIERS, TWO_TIERS, World, process_of

PICK = st.integers(0, 2**16)
SURE = st.just(True)


def pick(choices: Sequence[str], number: int) -> str:
    return choices[number % len(choices)]


class Run(RuleBasedStateMachine):
    """Workers, links and processes fail and return; the operator and time interfere."""

    world: World
    gone = Bundle("gone")

    @initialize(
        tree=st.sampled_from([TWO_TIERS, THREE_TIERS]),
        samples=st.sampled_from([8, 24, 41, {"a": 13, "b": 20}]),
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
    @rule(numbers=st.lists(PICK, min_size=1, max_size=8), settle=st.booleans() | SURE)
    def deliver(self, numbers: list[int], settle: bool) -> None:
        """Some messages arrive, in any order."""
        for number in numbers:
            if choices := self.world.deliverable():
                index = choices[number % len(choices)]
                to = process_of(self.world.network[index].to)
                self.world.deliver(index)
                if settle:
                    self.world.settle([to])

    @rule(number=PICK, settle=st.booleans())
    def repeat(self, number: int, settle: bool) -> None:
        """A message arrives, and a copy of it is still under way."""
        index = self.world.repeatable(number)
        if index is None:
            return
        to = process_of(self.world.network[index].to)
        self.world.deliver(index, keep=True)
        if settle:
            self.world.settle([to])

    @precondition(lambda self: self.world.network)
    @rule(number=PICK)
    def drop(self, number: int) -> None:
        self.world.drop(number % len(self.world.network))

    @precondition(lambda self: self.world.unnoticed)
    @rule(number=PICK)
    def notice_loss(self, number: int) -> None:
        self.world.notice_loss(number % len(self.world.unnoticed))

    @rule(number=PICK, lossy=st.booleans())
    def cut_link(self, number: int, lossy: bool) -> None:
        self.world.cut_link(pick(self.others, number), lossy=lossy)

    @precondition(lambda self: self.world.cut)
    @rule(number=PICK)
    def mend_link(self, number: int) -> None:
        self.world.mend_link(pick(sorted(self.world.cut), number))

    # ------------------------------------------------------------ work

    @precondition(lambda self: self.world.jobs)
    @rule(numbers=st.lists(PICK, min_size=1, max_size=4), finite=st.booleans() | SURE | SURE)
    def finish_rounds(self, numbers: list[int], finite: bool) -> None:
        for number in numbers:
            if self.world.jobs:
                worker = pick(sorted(self.world.jobs), number)
                self.world.finish_round(worker, finite=finite)
                self.world.settle([worker])

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(number=PICK)
    def handle_one(self, number: int) -> None:
        inbox, frozen = self.world.inbox, self.world.frozen
        if waiting := [n for n in inbox if inbox[n] and process_of(n) not in frozen]:
            self.world.handle(pick(waiting, number))

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]), heartbeats=st.booleans())
    def time_passes(self, seconds: float, heartbeats: bool) -> None:
        self.world.wait(seconds, heartbeats=heartbeats)

    # ------------------------------------------------------------ machines and people

    @rule(number=PICK)
    def kill_worker(self, number: int) -> None:
        if alive := [n for n in self.world.workers if self.world.alive(n)]:
            self.world.kill(pick(alive, number))

    @rule(number=PICK, keep=st.booleans())
    def restart_worker(self, number: int, keep: bool) -> None:
        self.world.restart(pick(self.world.workers, number), keep=keep)

    @rule(number=PICK)
    def save(self, number: int) -> None:
        if alive := [n for n in self.world.tree if self.world.alive(n)]:
            self.world.save(pick(alive, number))

    @rule(number=PICK)
    def freeze(self, number: int) -> None:
        if alive := [n for n in self.world.tree if self.world.alive(n)]:
            self.world.frozen.add(pick(alive, number))

    @precondition(lambda self: self.world.frozen)
    @rule(number=PICK)
    def thaw(self, number: int) -> None:
        self.world.frozen.discard(pick(sorted(self.world.frozen), number))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal(self.stays_away())

    def stays_away(self) -> list[str]:
        return []


class RunWithMemoryLoss(Run):
    """Servers lose what they knew as well, are evicted, given up, and gone for good."""

    @rule(number=PICK)
    def kill_server(self, number: int) -> None:
        servers = [n for n in self.world.servers if n != "root" and self.world.alive(n)]
        if servers:
            self.world.kill(pick(servers, number))

    @rule(number=PICK, keep=st.booleans())
    def restart_server(self, number: int, keep: bool) -> None:
        self.world.restart(pick(self.world.servers, number), keep=keep)

    @rule(number=PICK)
    def evict(self, number: int) -> None:
        self.world.evict(pick(self.others, number))

    @rule(seconds=st.sampled_from([21.0, 70.0]), heartbeats=st.booleans())
    def much_time_passes(self, seconds: float, heartbeats: bool) -> None:
        self.world.wait(seconds, heartbeats=heartbeats)

    def stays_away(self) -> list[str]:
        """Who is dead by now stays so, if somebody is left to do the work."""
        dead = [n for n in self.world.tree if not self.world.alive(n)]
        away = self.world.with_descendants(dead)
        return dead if set(self.world.workers) - away else []


FAST = settings(
    max_examples=60,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
THOROUGH = settings(
    max_examples=600,
    stateful_step_count=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("machine", [Run, RunWithMemoryLoss])
def test_no_sample_is_counted_twice_and_all_are_in_the_end(machine: type[Run]) -> None:
    run_state_machine_as_test(machine, settings=FAST)  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Run, RunWithMemoryLoss])
def test_the_same_at_length(machine: type[Run]) -> None:
    run_state_machine_as_test(machine, settings=THOROUGH)  # type: ignore[no-untyped-call]
