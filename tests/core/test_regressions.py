"""Faults that the core once had, or nearly had: each one as the events that showed it."""

from __future__ import annotations

import pytest

from halos.core.messages import (
    Assignment,
    BlockRequest,
    Drain,
    Grant,
    Joined,
    MemberAway,
    MemberJoined,
    MemberLost,
    ParentLost,
    Push,
    PushAnswer,
    Receipt,
    Reject,
    Resumed,
    RunLocalSteps,
)
from halos.core.samples import Block
from tests.core.builders import (
    finished,
    found,
    fragments,
    give_samples,
    join_region,
    join_worker,
    meet_parent,
    only,
    push_of,
    receive,
    region_server,
    request_of,
    root_server,
    tell,
    torch_state,
    values,
    working_region,
)
from tests.core.test_worker import assignment, waiting_for_answer


def test_a_late_copy_of_an_old_push_costs_its_sender_nothing() -> None:
    """It was taken for a push out of sequence, and the region had to start again."""
    root = root_server(100, tensors=torch_state(10.0))
    join_region(root)
    receive(root, "eu", request_of(1, 100))
    for sequence in (1, 2):
        report = {"contained": ((sequence, sequence + 1),)}
        receive(root, "eu", push_of(sequence, 1.0, **report))
    assert receive(root, "eu", push_of(1, 1.0, contained=((1, 2),))) == []
    assert values(root.tensors.publish()) == [8.0]
    assert only(receive(root, "eu", push_of(3, 1.0, contained=((5, 6),))), PushAnswer)


def test_work_done_while_an_answer_was_lost_enters_the_next_push() -> None:
    """``drop`` dropped it with what is in flight; but an hour of isolation costs no work."""
    tensors = torch_state(100.0, parent=True)
    region, (given,) = working_region(tensors=tensors, accumulation=2, in_flight="drop")
    for g in (1.0, 2.0):  # push 1 is sent, applied, and its answer lost
        given = only(receive(region, "w0", finished(given, g)), Assignment)
    tell(region, ParentLost())
    for g in (4.0, 8.0):
        given = only(receive(region, "w0", finished(given, g)), Assignment)
    tell(region, Joined(2))
    receive(region, "root", Resumed(2, 1, 1, False, 1, fragments(97.0)))
    given = only(receive(region, "w0", finished(given, 16.0)), Assignment)
    push = only(receive(region, "w0", finished(given, 32.0)), Push)
    assert values(push.payload) == [4.0 + 8.0 + 16.0 + 32.0]
    assert push.report.contained == ((8, 24),)
    assert push.report.dropped == ()


def test_a_rack_gets_the_model_of_a_region_that_never_applied_anything() -> None:
    """Both counted version 0, so the rack was told to begin with the run's first model."""
    region = region_server(tensors=torch_state(0.0, parent=True))
    meet_parent(region, version=7, payload=fragments(5.0))
    resumed = only(join_region(region, "rack"), Resumed)
    assert resumed.version == 0
    assert resumed.payload is not None
    assert values(resumed.payload) == [5.0]


class TestTheEnd:
    def test_a_region_without_workers_delivers_what_it_has(self) -> None:
        """Nobody waits there, so it asked for nothing and never heard that nothing is left."""
        region, (given,) = working_region(8, lease_block=0, accumulation=100)
        receive(region, "w0", finished(given))
        tell(region, MemberLost("w0"))
        assert region.state.leasing.ledger.available() == 4
        push = only(receive(region, "root", Drain(1, 1)), Push)
        assert push.report.contained == ((0, 4),)

    def test_a_region_delivers_what_it_has_while_a_rack_is_away(self) -> None:
        region, (given,) = working_region(8, lease_block=0, accumulation=100)
        join_region(region, "rack", fence=2)
        receive(region, "rack", request_of(1, 4, fence=2))
        receive(region, "w0", finished(given))
        tell(region, MemberLost("w0"))
        assert not found(receive(region, "root", Drain(1, 1)), Push)  # the rack may push more
        push = only(tell(region, MemberAway("rack")), Push)
        assert push.report.contained == ((0, 4),)

    def test_a_comparison_that_runs_out_of_samples_ends(self) -> None:
        root = root_server(8, stop_after_local_steps=1000)
        given = only(join_worker(root), Assignment)
        given = only(receive(root, "w0", finished(given)), Assignment)
        receive(root, "w0", finished(given))
        assert root.state.finished


class TestWhoWaits:
    def test_for_a_stale_request_asks_again_when_it_needs_more(self) -> None:
        """A request ahead of need was open, of which the root had nothing to give at the end."""
        region = region_server(lease_block=6)
        meet_parent(region)
        join_worker(region)
        give_samples(region, 0, 4)
        assert region.state.leasing.request == request_of(2, 0, 6)
        again = only(join_worker(region, "w1", fence=2), BlockRequest)
        assert (again.number, again.need) == (2, 4)

    def test_is_not_kept_waiting_by_stock_that_it_cannot_use(self) -> None:
        """The stock of another data set counted against the need."""
        region = region_server(lease_block=0)
        meet_parent(region)
        join_worker(region, "w0", datasets=("text", "code"))
        request = region.state.leasing.request
        assert request is not None
        receive(region, "root", Grant(1, request.number, (Block("text", 0, 0, 50, 0),)))
        asked = only(join_worker(region, "w1", fence=2, datasets=("code",)), BlockRequest)
        assert asked.need == 4


def test_a_copy_of_an_old_assignment_is_not_trained_again() -> None:
    """An idle worker took the copy for a new one."""
    worker = waiting_for_answer()
    receive(worker, "eu", Receipt(1, assignment(1).lease.id))
    assert receive(worker, "eu", assignment(1)) == []
    assert only(receive(worker, "eu", assignment(2)), RunLocalSteps)


def test_a_name_that_comes_back_in_another_role_gives_up_what_it_held() -> None:
    root = root_server(100)
    lease = only(join_worker(root, "x"), Assignment).lease
    tell(root, MemberJoined("x", "server", 2, ("text",)))
    assert root.state.leasing.ledger.returned[0].start == lease.ranges[0][0]
    assert only(join_region(root, "x", fence=3), Resumed).reset


@pytest.mark.parametrize("key", ["w0/1/1", "nonsense"])
def test_an_update_of_nobodys_lease_leaves_the_books_alone(key: str) -> None:
    root = root_server(100)
    given = only(join_worker(root), Assignment)
    receive(root, "w0", finished(given))
    before = root.state.leasing.ledger.credited.as_tuple()
    late = finished(given, lease=key)
    assert found(receive(root, "w0", late), Assignment) or found(receive(root, "w0", late), Reject)
    assert root.state.leasing.ledger.credited.as_tuple() == before
