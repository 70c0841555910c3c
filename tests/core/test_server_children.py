"""A server and its child servers: pushes, answers, coming back, being given up."""

from __future__ import annotations

import pytest

from halos.core.messages import (
    DeadlineReached,
    Drain,
    Finish,
    Grant,
    MemberAway,
    MemberJoined,
    MemberLost,
    PushAnswer,
    RaiseFence,
    Reject,
    Resume,
    Resumed,
)
from halos.core.samples import Report
from halos.core.server import Server
from tests.core.builders import (
    found,
    join_region,
    only,
    push_of,
    receive,
    request_of,
    root_server,
    sent,
    tell,
    torch_state,
    values,
)


@pytest.fixture
def root() -> Server:
    """Regions eu and us hold 0 to 100 and 100 to 200 of 200."""
    root = root_server(200, tensors=torch_state(10.0), drain_timeout_s=300)
    for fence, name in enumerate(("eu", "us"), start=1):
        join_region(root, name, fence=fence)
        receive(root, name, request_of(1, 100, fence=fence))
    return root


class TestPushes:
    def test_are_applied_at_once_and_answered_with_the_current_model(self, root: Server) -> None:
        eu = receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        us = receive(root, "us", push_of(1, 2.0, fence=2, contained=((100, 110),)))
        first, second = only(eu, PushAnswer, "eu"), only(us, PushAnswer, "us")
        assert (first.sequence, first.fence, first.version) == (1, 1, 1)
        assert (second.sequence, second.fence, second.version) == (1, 2, 2)
        assert (values(first.payload), values(second.payload)) == ([9.0], [7.0])

    def test_are_entered_into_the_books(self, root: Server) -> None:
        report = Report(5, 20, 300, 750.0, ((0, 10), (20, 30)), ((10, 20),))
        receive(root, "eu", push_of(1, 1.0, **_fields(report)))
        receive(root, "eu", push_of(2, 1.0, **_fields(Report(1, 4, 60, 90.0, ((30, 40),)))))
        ledger = root.state.leasing.ledger
        assert ledger.credited.as_tuple() == ((0, 40),)
        assert ledger.delivered.as_tuple() == ((0, 10), (20, 40))
        assert root.state.reported == Report(6, 24, 360, 840.0)
        assert root.state.version == 2

    def test_the_last_one_ends_the_run(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 60),), dropped=((60, 100),)))
        receive(root, "us", push_of(1, 1.0, fence=2, contained=((100, 199),)))
        assert not root.state.finished
        effects = receive(root, "us", push_of(2, 1.0, fence=2, contained=((199, 200),)))
        assert root.state.finished
        assert found(effects, PushAnswer, "us")


@pytest.mark.parametrize(("steps", "over"), [(49, False), (50, True), (51, True)])
def test_a_comparison_ends_at_the_update_that_reaches_its_steps(steps: int, over: bool) -> None:
    """a run ends at the first root update whose cumulative reported local steps reach the total"""
    root = root_server(None, stop_after_local_steps=100)
    join_region(root, "eu")
    receive(root, "eu", request_of(1, 100))
    receive(root, "eu", push_of(1, 1.0, contained=((0, 10),), local_steps=50))
    effects = receive(root, "eu", push_of(2, 1.0, contained=((10, 20),), local_steps=steps))
    assert bool(found(effects, Finish)) == root.state.finished == over


def _fields(report: Report) -> dict[str, object]:
    return {name: getattr(report, name) for name in Report.__slots__}


class TestGivingUp:
    """A region's unreported blocks are reclaimed only at the end of the epoch after a visible
    `drain_timeout`, or when the operator evicts it, in the same transition that raises its fence.
    """

    def test_not_while_others_still_have_samples(self) -> None:
        root = root_server(200, drain_timeout_s=300)
        join_region(root, "eu")
        receive(root, "eu", request_of(1, 100))
        assert root.next_deadline() is None

    def test_at_the_end_after_the_timeout(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 100),)), now=50.0)
        effects = receive(root, "eu", request_of(2, 4), now=60.0)  # nothing is left: it waits
        assert only(effects, Drain, "eu")
        assert root.next_deadline() == 360.0
        assert root.handle(DeadlineReached(), now=359.9) == []
        effects = root.handle(DeadlineReached(), now=360.0)
        assert found(effects, RaiseFence, "root.members") == [RaiseFence("us")]
        assert only(effects, Grant, "eu").blocks[0].start == 100
        late = receive(root, "us", push_of(1, 1.0, fence=2, contained=((100, 110),)), now=361.0)
        assert only(late, Reject, "us").reason == "fenced"

    def test_later_if_it_was_heard_of_meanwhile(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 100),)), now=50.0)
        receive(root, "eu", request_of(2, 4), now=60.0)
        receive(root, "us", push_of(1, 1.0, fence=2, contained=((100, 110),)), now=200.0)
        assert root.next_deadline() == 500.0

    def test_only_who_was_silent(self) -> None:
        root = root_server(200, drain_timeout_s=300)
        for fence, name in enumerate(("eu", "us"), start=1):
            join_region(root, name, fence=fence)
            receive(root, name, request_of(1, 100, fence=fence))
        receive(root, "us", request_of(2, 4, fence=2), now=10.0)
        receive(root, "us", push_of(1, 1.0, fence=2, contained=((100, 110),)), now=20.0)
        effects = root.handle(DeadlineReached(), now=310.0)
        assert found(effects, RaiseFence) == [RaiseFence("eu")]
        assert root.next_deadline() is None  # there are samples to hand out again

    def test_a_return_counts_as_a_sign_of_life_once(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 100),)), now=50.0)
        receive(root, "eu", request_of(2, 4), now=60.0)
        for fence, now, deadline in ((5, 300.0, 600.0), (6, 500.0, 600.0)):
            tell(root, MemberJoined("us", "server", fence, ("text",)), now=now)
            assert root.next_deadline() == deadline
        receive(root, "us", push_of(1, 1.0, fence=6, contained=((100, 110),)), now=550.0)
        assert root.next_deadline() == 850.0
        tell(root, MemberJoined("us", "server", 7, ("text",)), now=600.0)
        assert root.next_deadline() == 900.0

    def test_each_time_with_twice_the_patience(self, root: Server) -> None:
        """so that a region with slow rounds or a slow link gets to its end"""
        receive(root, "eu", push_of(1, 1.0, contained=((0, 100),)))
        receive(root, "eu", request_of(2, 4), now=1.0)
        assert root.next_deadline() == 301.0
        root.handle(DeadlineReached(), now=301.0)  # eu gets 100 to 104
        join_region(root, "us", fence=9, now=301.0)
        receive(root, "us", request_of(1, 96, fence=9), now=301.0)
        receive(root, "eu", push_of(2, 1.0, contained=((100, 104),)), now=305.0)
        receive(root, "eu", request_of(3, 4), now=310.0)
        assert root.next_deadline() == 910.0

    def test_nobody_who_holds_nothing(self, root: Server) -> None:
        for name, fence, start in (("eu", 1, 0), ("us", 2, 100)):
            report = {"contained": ((start, start + 99),)}
            receive(root, name, push_of(1, 1.0, fence=fence, **report))
        receive(root, "eu", request_of(2, 4), now=1.0)
        receive(root, "us", push_of(2, 1.0, fence=2, contained=((199, 200),)), now=10.0)
        effects = root.handle(DeadlineReached(), now=301.0)
        assert found(effects, RaiseFence) == [RaiseFence("eu")]

    def test_by_the_operator_at_any_time(self, root: Server) -> None:
        receive(root, "us", request_of(2, 4, fence=2))
        effects = tell(root, MemberLost("eu"))
        assert only(effects, Grant, "us").blocks[0].start == 0
        late = receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        assert only(late, Reject).reason == "fenced"


class TestSilence:
    """A silent region is only away: what it holds stays with it, and its work comes later."""

    def test_nothing_of_it_enters_before_it_joined_again(self, root: Server) -> None:
        assert tell(root, MemberAway("eu")) == []
        refused = receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        assert only(refused, Reject, "eu").reason == "fenced"
        back = join_region(root, "eu", fence=5, tenure=1, sequence=1, in_flight=True, granted=1)
        assert not only(back, Resumed).reset
        receive(root, "eu", push_of(1, 1.0, fence=5, contained=((0, 100),)))
        assert root.state.leasing.ledger.credited.as_tuple() == ((0, 100),)

    def test_it_is_sent_nothing_meanwhile(self, root: Server) -> None:
        receive(root, "eu", request_of(2, 50))
        tell(root, MemberAway("eu"))
        assert not sent(tell(root, MemberLost("us")), Grant)

    def test_it_does_not_end_the_others_waiting(self, root: Server) -> None:
        receive(root, "us", request_of(2, 50, fence=2), now=1.0)
        tell(root, MemberAway("eu"))
        assert root.next_deadline() == 301.0


class TestDraining:
    def test_everybody_is_told_and_once(self) -> None:
        root = root_server(200)
        for fence, name in enumerate(("eu", "us"), start=1):
            join_region(root, name, fence=fence)
        assert not found(receive(root, "eu", request_of(1, 100)), Drain)
        told = receive(root, "us", request_of(1, 100, fence=2))
        assert sent(told, Drain) == {"eu": Drain(1, 1), "us": Drain(2, 1)}
        for name, fence, start in (("eu", 1, 0), ("us", 2, 100)):
            push = push_of(1, 1.0, fence=fence, contained=((start, start + 10),))
            assert not found(receive(root, name, push), Drain)

    def test_who_asks_is_told_again(self, root: Server) -> None:
        assert only(receive(root, "eu", request_of(2, 4)), Drain, "eu") == Drain(1, 1)

    def test_who_comes_back_is_told_again(self, root: Server) -> None:
        receive(root, "eu", request_of(2, 4))
        back = join_region(root, "eu", fence=5, tenure=1, granted=1)
        assert only(back, Drain, "eu") == Drain(5, 1)


def test_after_the_end_a_region_is_told_to_stop(root: Server) -> None:
    receive(root, "eu", push_of(1, 1.0, contained=((0, 100),)))
    receive(root, "us", push_of(1, 1.0, fence=2, contained=((100, 200),)))
    before = values(root.tensors.publish())
    for message in (push_of(2, 1.0), Resume(1, 1, 1, True, 1), request_of(2, 4)):
        (effect,) = receive(root, "eu", message)
        assert type(effect.message).__name__ == "Stop"  # type: ignore[union-attr]
    assert values(root.tensors.publish()) == before
