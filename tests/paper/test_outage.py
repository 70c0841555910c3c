"""An outage is not "in flight": a push not acknowledged is re-cut (DESIGN 4).

The child asks the parent for the last sequence number applied; if its push was applied it takes
the answer; otherwise it forms a new `u = base - theta` under the same number, containing all work
since. An hour of isolation costs staleness, not work.
"""

from __future__ import annotations

from typing import Literal

import pytest

from halos.core.messages import (
    Assignment,
    Effect,
    Joined,
    ParentLost,
    Push,
    PushAnswer,
    Resume,
    Resumed,
)
from halos.core.samples import Report
from halos.core.server import Server
from tests.core.builders import (
    PLAIN,
    finished,
    found,
    fragments,
    join_region,
    only,
    push_of,
    receive,
    request_of,
    root_server,
    tell,
    torch_state,
    values,
    working_region,
)

MODES = ["drop", "carry"]


def started(mode: str = "drop") -> tuple[Server, Assignment]:
    tensors = torch_state(100.0, outer=PLAIN, parent=True)
    region, (first,) = working_region(tensors=tensors, accumulation=2, in_flight=mode)
    return region, first


def update(region: Server, assignment: Assignment, *gs: float) -> tuple[Assignment, list[Effect]]:
    effects: list[Effect] = []
    for g in gs:
        latest = receive(region, "w0", finished(assignment, g))
        assignment = only(latest, Assignment)
        effects += latest
    return assignment, effects


def come_back(region: Server, *, fence: int, applied: int) -> list[Effect]:
    """The link returns, and the parent says which push of ours it applied last."""
    (resume,) = tell(region, Joined(fence))
    assert found([resume], Resume, "root")
    push = region.state.push
    was_applied = push is not None and push.sequence == applied
    payload = fragments(0.0) if was_applied else None  # the answer, if it is due
    return receive(region, "root", Resumed(fence, 1, applied, False, 5, payload))


@pytest.mark.parametrize("mode", MODES)
class TestAPushThatWasLost:
    def test_is_cut_again_under_the_same_number_with_all_work_since(
        self, mode: Literal["drop", "carry"]
    ) -> None:
        region, assignment = started(mode)
        assignment, effects = update(region, assignment, 10.0, 20.0)
        lost = only(effects, Push)
        assert (lost.sequence, values(lost.payload)) == (1, [30.0])
        tell(region, ParentLost())
        assignment, _ = update(region, assignment, 1.0, 2.0, 3.0)
        push = only(come_back(region, fence=2, applied=0), Push, "root")
        assert (push.sequence, push.fence, values(push.payload)) == (1, 2, [36.0])
        assert push.report == Report(5, 20, 200, 400.0, ((0, 20),), ())

    def test_then_counts_as_in_flight_from_the_new_cut_on(
        self, mode: Literal["drop", "carry"]
    ) -> None:
        region, assignment = started(mode)
        assignment, _ = update(region, assignment, 10.0, 20.0)
        tell(region, ParentLost())
        assignment, _ = update(region, assignment, 3.0)
        come_back(region, fence=2, applied=0)
        assignment, _ = update(region, assignment, 7.0)
        receive(region, "root", PushAnswer(1, 2, 6, fragments(0.0)))
        assert values(region.tensors.publish()) == [0.75 * (100 - 33 - 7)]
        _, effects = update(region, assignment, 1.0, 1.0)
        push = only(effects, Push)
        assert push.sequence == 2
        assert values(push.payload) == [2.0 if mode == "drop" else 9.0]
        assert push.report.updates == 3

    def test_may_be_lost_again(self, mode: Literal["drop", "carry"]) -> None:
        region, assignment = started(mode)
        assignment, _ = update(region, assignment, 10.0, 20.0)
        for fence in (2, 3, 4):
            tell(region, ParentLost())
            assignment, _ = update(region, assignment, 1.0)
            push = only(come_back(region, fence=fence, applied=0), Push)
            assert (push.sequence, values(push.payload)) == (1, [30.0 + fence - 1])

    def test_keeps_what_earlier_merges_dropped_in_its_report(
        self, mode: Literal["drop", "carry"]
    ) -> None:
        region, assignment = started(mode)
        assignment, _ = update(region, assignment, 10.0, 20.0, 4.0)
        receive(region, "root", PushAnswer(1, 1, 1, fragments(0.0)))
        assignment, _ = update(region, assignment, 1.0, 1.0)  # push 2 goes out and is lost
        tell(region, ParentLost())
        assignment, _ = update(region, assignment, 1.0)
        push = only(come_back(region, fence=2, applied=1), Push)
        assert (push.sequence, push.report.updates) == (2, 4)
        contained, dropped = push.report.contained, push.report.dropped
        expected = (((12, 24),), ((8, 12),)) if mode == "drop" else (((8, 24),), ())
        assert (contained, dropped) == expected
        assert values(push.payload) == [3.0 if mode == "drop" else 7.0]


@pytest.mark.parametrize("mode", MODES)
class TestAPushThatWasApplied:
    def test_is_not_sent_again(self, mode: Literal["drop", "carry"]) -> None:
        region, assignment = started(mode)
        assignment, _ = update(region, assignment, 10.0, 20.0)
        tell(region, ParentLost())
        update(region, assignment, 1.0)
        assert come_back(region, fence=2, applied=1) == []

    def test_takes_the_answer_and_carries_the_work_since(
        self, mode: Literal["drop", "carry"]
    ) -> None:
        """An hour of isolation costs staleness, not work."""
        region, assignment = started(mode)
        assignment, _ = update(region, assignment, 10.0, 20.0)
        tell(region, ParentLost())
        assignment, _ = update(region, assignment, 2.0)
        come_back(region, fence=2, applied=1)
        assert values(region.tensors.publish()) == [0.75 * 68.0]
        assert region.state.merged_version == 3
        _, effects = update(region, assignment, 1.0, 1.0)
        push = only(effects, Push)
        assert values(push.payload) == [4.0]
        assert (push.report.contained, push.report.dropped) == (((8, 20),), ())


class TestWorkOfAnOutage:
    def test_that_began_with_nothing_in_flight_is_pushed_in_one(self) -> None:
        region, assignment = started()
        assignment, _ = update(region, assignment, 10.0)
        tell(region, ParentLost())
        assignment, effects = update(region, assignment, *[1.0] * 9)
        assert not found(effects, Push)
        push = only(come_back(region, fence=2, applied=0), Push)
        assert (push.sequence, values(push.payload)) == (1, [19.0])
        assert push.report.contained == ((0, 40),)

    def test_below_k_waits_for_the_rest(self) -> None:
        region, assignment = started()
        tell(region, ParentLost())
        assignment, _ = update(region, assignment, 10.0)
        assert not found(come_back(region, fence=2, applied=0), Push)
        _, effects = update(region, assignment, 1.0)
        assert values(only(effects, Push).payload) == [11.0]


class TestTheWholeExchange:
    """Both ends: whatever message is lost, the root applies each update once."""

    @pytest.mark.parametrize("lost", ["push", "answer"])
    def test_nothing_is_lost_or_counted_twice(self, lost: str) -> None:
        root = root_server(1000, tensors=torch_state(100.0))
        join_region(root, "eu", fence=1)
        receive(root, "eu", request_of(1, 1000))
        region, assignment = started()
        assignment, effects = update(region, assignment, 10.0, 20.0)
        if lost == "answer":
            receive(root, "eu", only(effects, Push))
        tell(region, ParentLost())
        assignment, _ = update(region, assignment, 1.0, 2.0)
        resume = only(tell(region, Joined(2)), Resume)
        back = join_region(
            root,
            "eu",
            fence=2,
            tenure=resume.tenure,
            sequence=resume.sequence,
            in_flight=resume.in_flight,
        )
        again = receive(region, "root", only(back, Resumed))
        if lost == "answer":
            assert not found(again, Push)
            applied = [10.0, 20.0]
        else:
            receive(region, "root", only(receive(root, "eu", only(again, Push)), PushAnswer))
            applied = [10.0, 20.0, 1.0, 2.0]
        assert values(root.tensors.publish()) == [100.0 - sum(applied)]
        assert root.state.leasing.ledger.credited.as_tuple() == ((0, 4 * len(applied)),)
        assert region.state.push is None

    def test_a_push_under_the_old_fence_that_arrives_late_is_refused(self) -> None:
        root = root_server(1000, tensors=torch_state(100.0))
        join_region(root, "eu", fence=1)
        receive(root, "eu", request_of(1, 1000))
        old = push_of(1, 30.0, fence=1, contained=((0, 8),))
        join_region(root, "eu", fence=2, tenure=1, sequence=1, in_flight=True)
        receive(root, "eu", push_of(1, 36.0, fence=2, contained=((0, 20),)))
        receive(root, "eu", old)
        assert values(root.tensors.publish()) == [64.0]
        assert root.state.leasing.ledger.credited.as_tuple() == ((0, 20),)
