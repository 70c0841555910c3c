"""A server and its workers: updates, verdicts, outstanding assignments."""

from __future__ import annotations

from halos.core.messages import Assignment, MemberJoined, MemberLost, Ready, Receipt, Reject, Stop
from halos.core.samples import Report
from tests.core.builders import (
    finished,
    found,
    fragments,
    give_samples,
    join_worker,
    meet_parent,
    only,
    receive,
    region_server,
    root_server,
    sent,
    tell,
    torch_state,
    values,
    working_region,
)


class TestUpdates:
    def test_are_applied_at_once_and_answered_with_fresh_parameters(self) -> None:
        root = root_server(tensors=torch_state(10.0))
        first = only(join_worker(root), Assignment)
        assert (values(first.payload), first.version) == ([10.0], 0)
        second = only(receive(root, "w0", finished(first, 1.0)), Assignment)
        assert (values(second.payload), second.version) == ([9.0], 1)
        assert second.answers == first.lease.id
        assert second.lease.ranges == ((4, 8),)
        assert second.number == first.number + 1

    def test_of_one_worker_are_seen_by_the_next(self) -> None:
        root = root_server(tensors=torch_state(10.0))
        slow = only(join_worker(root, "w0", fence=1), Assignment)
        fast = only(join_worker(root, "w1", fence=2), Assignment)
        receive(root, "w1", finished(fast, 1.0))
        answer = only(receive(root, "w0", finished(slow, 2.0)), Assignment)
        assert values(answer.payload) == [7.0]
        assert values(slow.payload) == [10.0]

    def test_are_entered_into_the_books(self) -> None:
        root = root_server()
        assignment = only(join_worker(root), Assignment)
        receive(root, "w0", finished(assignment, tokens=50, loss=3.0))
        ledger = root.state.leasing.ledger
        assert ledger.credited.as_tuple() == ledger.delivered.as_tuple() == ((0, 4),)
        assert root.state.reported == Report(1, 4, 50, 150.0)

    def test_count_as_reported_however_many_steps_they_took(self) -> None:
        root = root_server()
        assignment = only(join_worker(root), Assignment)
        receive(root, "w0", finished(assignment, local_steps=2))
        assert root.state.reported.local_steps == 2

    def test_are_received_when_there_is_no_next_lease(self) -> None:
        region, (assignment,) = working_region(4, lease_block=0)
        effects = receive(region, "w0", finished(assignment))
        assert only(effects, Receipt, "w0") == Receipt(1, assignment.lease.id)
        later = only(give_samples(region, 4, 8), Assignment)
        assert later.answers is None


class TestRepeats:
    """A repeat gets the same verdict and the *outstanding* assignment again, not a new one."""

    def test_of_an_applied_update(self) -> None:
        root = root_server(tensors=torch_state(10.0))
        first = only(join_worker(root), Assignment)
        update = finished(first, 1.0)
        answer = only(receive(root, "w0", update), Assignment)
        again = only(receive(root, "w0", update), Assignment)
        assert (again.lease, again.number, again.answers) == (
            answer.lease,
            answer.number,
            first.lease.id,
        )
        assert values(root.tensors.publish()) == [9.0]
        assert root.state.version == 1

    def test_are_answered_with_the_parameters_of_now(self) -> None:
        root = root_server(tensors=torch_state(10.0))
        first = only(join_worker(root), Assignment)
        other = only(join_worker(root, "w1", fence=2), Assignment)
        receive(root, "w0", finished(first, 1.0))
        receive(root, "w1", finished(other, 2.0))
        again = only(receive(root, "w0", finished(first, 1.0)), Assignment)
        assert (values(again.payload), again.version) == ([7.0], 2)

    def test_under_a_new_fence(self) -> None:
        root = root_server()
        first = only(join_worker(root, fence=1), Assignment)
        answer = only(receive(root, "w0", finished(first)), Assignment)
        tell(root, MemberJoined("w0", "worker", 2, ("text",)))
        again = only(receive(root, "w0", finished(first, fence=2)), Assignment)
        assert (again.lease, again.fence) == (answer.lease, 2)
        assert root.state.version == 1

    def test_after_the_worker_had_been_given_up(self) -> None:
        root = root_server()
        first = only(join_worker(root, fence=1), Assignment)
        second = only(receive(root, "w0", finished(first)), Assignment)
        tell(root, MemberLost("w0"))
        tell(root, MemberJoined("w0", "worker", 2, ("text",)))
        again = only(receive(root, "w0", finished(first, fence=2)), Assignment)
        assert root.state.version == 1
        assert again.lease.id != second.lease.id
        assert again.lease.ranges == second.lease.ranges

    def test_with_nothing_outstanding(self) -> None:
        region, (assignment,) = working_region(4, lease_block=0)
        update = finished(assignment)
        assert receive(region, "w0", update)
        again = receive(region, "w0", update)
        assert found(again, Receipt, "w0") == [Receipt(1, assignment.lease.id)]
        assert not found(again, Assignment)
        assert region.state.version == 1


class TestComingBack:
    def test_who_still_trains_is_left_alone(self) -> None:
        root = root_server()
        assignment = only(join_worker(root, fence=1), Assignment)
        assert join_worker(root, fence=2, lease=assignment.lease.id) == []
        receive(root, "w0", finished(assignment, fence=2))
        assert root.state.version == 1

    def test_who_forgot_its_lease_gets_the_same_one_again(self) -> None:
        root = root_server()
        before = only(join_worker(root, fence=1), Assignment)
        after = only(join_worker(root, fence=2), Assignment)
        assert (after.lease, after.number, after.fence) == (before.lease, before.number, 2)

    def test_who_was_given_up_gets_another(self) -> None:
        root = root_server()
        before = only(join_worker(root, fence=1), Assignment)
        tell(root, MemberLost("w0"))
        late = join_worker(root, fence=2, lease=before.lease.id)
        assert only(late, Assignment).lease.id != before.lease.id

    def test_what_a_lost_worker_held_goes_to_another(self) -> None:
        root = root_server(8)
        lost = only(join_worker(root, "w0", fence=1), Assignment)
        other = only(join_worker(root, "w1", fence=2), Assignment)
        assert not found(receive(root, "w1", finished(other)), Assignment)
        effects = tell(root, MemberLost("w0"))
        assert only(effects, Assignment, "w1").lease.ranges == lost.lease.ranges

    def test_a_late_update_of_a_lease_given_to_another_is_refused(self) -> None:
        root = root_server(8, tensors=torch_state(1.0))
        lost = only(join_worker(root, "w0", fence=1), Assignment)
        other = only(join_worker(root, "w1", fence=2), Assignment)
        receive(root, "w1", finished(other, 0.0))
        tell(root, MemberLost("w0"))
        tell(root, MemberJoined("w0", "worker", 3, ("text",)))
        effects = receive(root, "w0", finished(lost, 1.0, fence=3))
        assert only(effects, Reject, "w0").reason == "unknown_lease"
        assert values(root.tensors.publish()) == [1.0]
        assert root.state.leasing.ledger.credited.as_tuple() == ((4, 8),)

    def test_a_waiting_worker_that_died_waits_no_more(self) -> None:
        region = region_server(lease_block=0)
        meet_parent(region)
        join_worker(region, "w0", fence=1)
        join_worker(region, "w1", fence=2)
        tell(region, MemberLost("w0"))
        assert sent(give_samples(region, 0, 4), Assignment).keys() == {"w1"}


class TestBeforeAndAfter:
    def test_a_region_hands_nothing_out_before_it_met_its_parent(self) -> None:
        region = region_server()
        assert join_worker(region) == []
        meet_parent(region)
        assert found(give_samples(region, 0, 40), Assignment)

    def test_what_is_handed_out_is_the_parents_model(self) -> None:
        region = region_server(tensors=torch_state(0.0, parent=True))
        meet_parent(region, version=7, payload=fragments(5.0))
        join_worker(region)
        assert values(only(give_samples(region, 0, 40), Assignment).payload) == [5.0]

    def test_after_the_end_everybody_is_told_to_stop(self) -> None:
        root = root_server(4)
        join_worker(root, "w1", fence=2)
        effects = join_worker(root, "w0", fence=1)
        assert not found(effects, Assignment)
        first = root.state.leasing.children["w1"].lease
        assert first is not None
        assert found(receive(root, "w0", Ready(1, None)), Stop) == []
        update = finished(only(join_worker(root, "w1", fence=3), Assignment))
        effects = receive(root, "w1", update)
        assert sent(effects, Stop).keys() == {"w0", "w1"}
        assert sent(receive(root, "w2", Ready(4, None)), Stop).keys() == {"w2"}
        assert sent(receive(root, "w1", update), Stop).keys() == {"w1"}
        assert root.state.version == 1
