"""A server and its parent, seen from below: when it pushes, what it tells, how it comes back."""

from __future__ import annotations

from halos.core.messages import (
    Assignment,
    BlockRequest,
    Drain,
    Effect,
    FenceStale,
    Finish,
    Grant,
    Joined,
    MemberLost,
    ParentLost,
    Push,
    PushAnswer,
    Receipt,
    Refused,
    Resume,
    Resumed,
    RunOver,
    Stop,
)
from halos.core.samples import Report
from halos.core.server import Server
from tests.core.builders import (
    finished,
    found,
    fragments,
    give_samples,
    join_worker,
    meet_parent,
    only,
    receive,
    sent,
    tell,
    torch_state,
    values,
    working_region,
)


def rounds(region: Server, assignment: Assignment, count: int) -> tuple[Assignment, list[Effect]]:
    """Let the worker finish ``count`` rounds; its next assignment and all that came of them."""
    effects: list[Effect] = []
    for _ in range(count):
        latest = receive(region, "w0", finished(assignment, 1.0))
        assignment = only(latest, Assignment)
        effects += latest
    return assignment, effects


def answer(
    region: Server, sequence: int, *model: float, fence: int = 1, version: int = 1
) -> list[Effect]:
    return receive(region, "root", PushAnswer(sequence, fence, version, fragments(*model)))


def working(**settings: object) -> tuple[Server, Assignment]:
    """A region that pushes every 2 updates, with its worker on its first lease."""
    tensors = torch_state(10.0, parent=True)
    region, (first,) = working_region(tensors=tensors, **{"accumulation": 2, **settings})
    return region, first


class TestPushing:
    def test_after_k_updates(self) -> None:
        region, assignment = working(accumulation=3)
        assignment, effects = rounds(region, assignment, 2)
        assert not found(effects, Push)
        _, effects = rounds(region, assignment, 1)
        push = only(effects, Push, "root")
        assert (push.sequence, push.fence, push.base_version) == (1, 1, 0)
        assert values(push.payload) == [3.0]
        assert push.report == Report(3, 12, 120, 240.0, ((0, 12),))

    def test_not_while_one_is_in_flight(self) -> None:
        region, assignment = working()
        assignment, effects = rounds(region, assignment, 7)
        assert len(found(effects, Push)) == 1

    def test_k_updates_after_the_merge_and_not_after_the_push(self) -> None:
        region, assignment = working(accumulation=3)
        assignment, _ = rounds(region, assignment, 3 + 2)
        assert not found(answer(region, 1, 0.0), Push)
        assignment, effects = rounds(region, assignment, 2)
        assert not found(effects, Push)
        _, effects = rounds(region, assignment, 1)
        assert only(effects, Push).sequence == 2

    def test_reports_what_was_dropped_with_the_next_push(self) -> None:
        region, assignment = working()
        assignment, _ = rounds(region, assignment, 2 + 1)
        answer(region, 1, 0.0, version=7)
        _, effects = rounds(region, assignment, 2)
        push = only(effects, Push)
        assert push.report == Report(3, 12, 120, 240.0, ((12, 20),), ((8, 12),))
        assert push.base_version == 7

    def test_reports_what_was_carried_as_contained(self) -> None:
        region, assignment = working(in_flight="carry")
        assignment, _ = rounds(region, assignment, 2 + 1)
        answer(region, 1, 0.0)
        _, effects = rounds(region, assignment, 2)
        assert only(effects, Push).report == Report(3, 12, 120, 240.0, ((8, 20),))

    def test_a_repeated_answer_is_merged_once(self) -> None:
        region, assignment = working(merge_weight=0.5)
        assignment, _ = rounds(region, assignment, 2)
        answer(region, 1, 0.0)
        after = values(region.tensors.publish())
        assert answer(region, 1, 0.0) == []
        assert values(region.tensors.publish()) == after == [4.0]

    def test_an_answer_to_another_push_is_not_merged(self) -> None:
        region, assignment = working()
        rounds(region, assignment, 2)
        assert answer(region, 2, 0.0) == answer(region, 0, 0.0) == []
        assert values(region.tensors.publish()) == [8.0]


class TestDraining:
    """when nothing is left to issue, servers push below K, `carry` is forced, and the run ends
    when all is credited and nothing is in flight
    """

    def drained(self, samples: int, updates: int) -> tuple[Server, list[Effect]]:
        region, (assignment,) = working_region(
            samples, tensors=torch_state(10.0, parent=True), accumulation=100
        )
        effects: list[Effect] = []
        for i in range(updates):
            effects = receive(region, "w0", finished(assignment, 1.0))
            if i < updates - 1:
                assignment = only(effects, Assignment)
        return region, effects

    def test_pushes_below_k_when_the_parent_has_nothing_left(self) -> None:
        region, effects = self.drained(8, 2)
        assert not found(effects, Push)
        effects = receive(region, "root", Drain(1, 1))
        assert only(effects, Push).report.contained == ((0, 8),)

    def test_not_while_there_is_something_to_hand_out(self) -> None:
        region, _ = self.drained(16, 2)
        assert not found(receive(region, "root", Drain(1, 1)), Push)

    def test_a_drain_of_an_earlier_fence_is_no_news(self) -> None:
        region, _ = self.drained(8, 2)
        assert receive(region, "root", Drain(0, 1)) == []

    def test_each_late_update_is_pushed_as_it_comes(self) -> None:
        region, assignments = working_region(
            8, workers=2, tensors=torch_state(10.0, parent=True), accumulation=100
        )
        receive(region, "root", Drain(1, 1))
        effects = receive(region, "w0", finished(assignments[0], 1.0))
        assert only(effects, Push).report.contained == ((0, 4),)
        assert only(effects, Receipt, "w0")
        assert not found(receive(region, "w1", finished(assignments[1], 1.0)), Push)
        push = only(answer(region, 1, 9.0), Push)
        assert push.report == Report(1, 4, 40, 80.0, ((4, 8),))

    def test_more_samples_end_the_draining(self) -> None:
        region, _ = self.drained(8, 2)
        receive(region, "root", Drain(1, 1))
        answer(region, 1, 0.0)
        assignment = only(give_samples(region, 8, 12), Assignment, "w0")
        effects = receive(region, "w0", finished(assignment, 1.0))
        assert not found(effects, Push)  # there may be more
        assert only(receive(region, "root", Drain(1, 2)), Push).report.contained == ((8, 12),)


class TestLosingTheParent:
    def test_work_goes_on_and_nothing_is_sent(self) -> None:
        region, assignment = working()
        tell(region, ParentLost())
        assignment, effects = rounds(region, assignment, 6)
        assert {type(effect.message) for effect in effects} == {Assignment}  # type: ignore[union-attr]
        assert region.state.version == 6

    def test_coming_back_it_says_where_it_stands(self) -> None:
        region, assignment = working()
        assignment, _ = rounds(region, assignment, 2)
        answer(region, 1, 0.0, version=5)
        assert only(tell(region, Joined(2)), Resume) == Resume(2, 1, 1, False, 5, 1)
        receive(region, "root", Resumed(2, 1, 1, False, 5, None))
        rounds(region, assignment, 2)
        assert only(tell(region, Joined(3)), Resume) == Resume(3, 1, 2, True, 5, 1, 2)

    def test_while_it_is_away_nothing_is_cut(self) -> None:
        """only the parent knows whether a state that was saved is the newest"""
        region, assignment = working()
        tell(region, ParentLost())
        rounds(region, assignment, 2)
        assert only(tell(region, Joined(2)), Resume) == Resume(2, 1, 0, False, 0, 1)

    def test_an_answer_to_an_earlier_session_is_no_news(self) -> None:
        region, _ = working()
        tell(region, Joined(2))
        assert receive(region, "root", Resumed(1, 9, 9, True, 9, fragments(0.0))) == []
        assert region.state.tenure == 1

    def test_an_open_request_is_sent_again_under_the_new_fence(self) -> None:
        region, _ = working_region(4)
        request = region.state.leasing.request
        assert request is not None
        effects = meet_parent(region, fence=2, reset=False)
        again = only(effects, BlockRequest, "root")
        assert again == BlockRequest(2, request.number, request.need, request.want)

    def test_a_request_that_is_sent_again_does_not_shrink(self) -> None:
        region, (assignment,) = working_region(4, lease_block=0)
        effects = receive(region, "w0", finished(assignment))
        assert only(effects, BlockRequest) == BlockRequest(1, 2, 4, 4)
        tell(region, MemberLost("w0"))
        again = only(meet_parent(region, fence=2, reset=False), BlockRequest)
        assert again == BlockRequest(2, 2, 4, 4)

    def test_a_refused_fence_means_joining_again(self) -> None:
        region, _ = working()
        stale = Refused("fenced", "1", 1, "join again")
        assert found(receive(region, "root", stale), FenceStale, "eu.session")
        tell(region, Joined(2))
        assert receive(region, "root", stale) == []

    def test_a_refused_push_means_joining_again(self) -> None:
        region, _ = working()
        effects = receive(region, "root", Refused("non_finite", "1", 1, "not applied"))
        assert found(effects, FenceStale, "eu.session")


class TestTheEnd:
    def test_is_passed_on(self) -> None:
        region, _ = working()
        join_worker(region, "w1", fence=2)
        tell(region, MemberLost("w1"))
        effects = receive(region, "root", Stop())
        assert sent(effects, Stop).keys() == {"w0"}
        assert found(effects, RunOver, "eu.members") and found(effects, RunOver, "eu.session")
        assert found(effects, Finish)
        assert region.next_deadline() is None

    def test_nothing_is_applied_after_it(self) -> None:
        region, assignment = working()
        receive(region, "root", Stop())
        receive(region, "w0", finished(assignment, 1.0))
        receive(region, "root", Grant(1, 99, ()))
        assert region.state.version == 0
