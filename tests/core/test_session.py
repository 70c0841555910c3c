"""The child's end: joins, beats, notices silence, tries again."""

from __future__ import annotations

import pytest

from halos.core.membership import MembershipSettings, Session
from halos.core.messages import (
    DeadlineReached,
    Effect,
    FenceStale,
    Finish,
    Heartbeat,
    HeartbeatSeen,
    Join,
    Joined,
    LinkLost,
    ParentLost,
    Refused,
    RunOver,
    Send,
    Started,
    Tell,
    Welcome,
)
from halos.core.tensors import RefusalReason
from tests.core.builders import found, receive, tell

JOIN = Join("worker", "run", "m", ("a",))
SETTINGS = MembershipSettings(heartbeat_interval_s=5, heartbeat_timeout_s=30, retry_s=2)


def session(settings: MembershipSettings = SETTINGS) -> Session:
    node = Session("w", "eu", JOIN, settings)
    node.handle(Started(), now=0.0)
    return node


def joined(*, fence: int = 1, now: float = 0.0) -> Session:
    node = session()
    receive(node, "eu.members", Welcome(fence), now=now)
    return node


def deadline(node: Session) -> list[Effect]:
    """Let the time pass that it asked for."""
    now = node.next_deadline()
    assert now is not None
    return node.handle(DeadlineReached(), now=now)


class TestJoining:
    def test_begins_at_once(self) -> None:
        node = Session("w", "eu", JOIN, SETTINGS)
        assert node.handle(Started(), now=7.0) == [Send("eu.members", JOIN)]
        assert node.next_deadline() == 9.0

    def test_is_tried_again_until_somebody_answers(self) -> None:
        node = session()
        for tried in (2.0, 4.0, 6.0):
            assert node.next_deadline() == tried
            assert deadline(node) == [Send("eu.members", JOIN)]

    def test_a_welcome_is_told_to_the_node(self) -> None:
        node = session()
        assert receive(node, "eu.members", Welcome(3), now=1.0) == [Tell("w", Joined(3))]
        assert node.next_deadline() == 6.0

    @pytest.mark.parametrize("fence", [2, 3])
    def test_an_old_welcome_is_no_news(self, fence: int) -> None:
        assert receive(joined(fence=3), "eu.members", Welcome(fence)) == []

    def test_a_newer_welcome_is(self) -> None:
        assert receive(joined(fence=3), "eu.members", Welcome(4)) == [Tell("w", Joined(4))]

    @pytest.mark.parametrize("reason", ["other_run", "other_model", "other_dataset"])
    def test_a_refusal_for_good_ends_it(self, reason: RefusalReason) -> None:
        node = session()
        assert receive(node, "eu.members", Refused(reason, "join", None, "no")) == [Finish()]
        assert node.next_deadline() is None


class TestBeating:
    def test_goes_on_as_long_as_it_is_heard(self) -> None:
        node = joined()
        for i in range(20):
            assert node.next_deadline() == 5.0 * (i + 1)
            assert deadline(node) == [Send("eu.members", Heartbeat(1))]
            receive(node, "eu.members", HeartbeatSeen(1), now=5.0 * (i + 1))

    def test_silence_of_the_parent_is_told_and_it_joins_again(self) -> None:
        node = joined()
        effects: list[Effect] = []
        while not found(effects, ParentLost):
            effects = deadline(node)
        assert effects == [Tell("w", ParentLost()), Send("eu.members", JOIN)]
        assert node.next_deadline() == 32.0

    def test_an_answer_to_an_earlier_fence_is_no_sign_of_life(self) -> None:
        node = joined(fence=2)
        receive(node, "eu.members", HeartbeatSeen(1), now=29.0)
        assert found(node.handle(DeadlineReached(), now=30.0), ParentLost)

    def test_can_be_switched_off(self) -> None:
        node = session(MembershipSettings(heartbeat_interval_s=0))
        receive(node, "eu.members", Welcome(1))
        assert node.next_deadline() is None

    def test_an_early_deadline_changes_nothing(self) -> None:
        assert joined().handle(DeadlineReached(), now=4.9) == []


class TestLosing:
    def test_a_lost_link_is_told_once(self) -> None:
        node = joined()
        assert node.handle(LinkLost(), now=3.0) == [
            Tell("w", ParentLost()),
            Send("eu.members", JOIN),
        ]
        assert node.handle(LinkLost(), now=3.5) == []  # it tries again when it said it would

    def test_a_stale_fence_means_joining_again(self) -> None:
        assert found(tell(joined(), FenceStale()), Join, "eu.members") == [JOIN]

    def test_a_raised_fence_means_joining_again(self) -> None:
        effects = receive(joined(fence=3), "eu.members", Refused("fenced", "session", 3, ""))
        assert found(effects, ParentLost) and found(effects, Join)

    def test_the_raising_of_an_earlier_fence_is_no_news(self) -> None:
        node = joined(fence=3)
        assert receive(node, "eu.members", Refused("fenced", "session", 2, "")) == []

    def test_after_a_restart_it_joins_whatever_it_knew(self) -> None:
        node = joined(fence=3)
        assert node.handle(Started(), now=50.0) == [Send("eu.members", JOIN)]
        # of a parent that lost its state, too, and counts fences from the start
        assert receive(node, "eu.members", Welcome(2), now=51.0) == [Tell("w", Joined(2))]


def test_ends_with_the_run() -> None:
    node = joined()
    assert tell(node, RunOver()) == [Finish()]
    assert node.next_deadline() is None
    assert node.handle(DeadlineReached(), now=99.0) == []
