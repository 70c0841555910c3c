"""Join, heartbeat, fence, timeout, at the parent's end."""

from __future__ import annotations

import pytest

from halos.core.membership import Identity, Membership, MembershipSettings
from halos.core.messages import (
    DeadlineReached,
    Effect,
    Finish,
    Heartbeat,
    HeartbeatSeen,
    Join,
    Leave,
    MemberAway,
    MemberJoined,
    MemberLost,
    Message,
    RaiseFence,
    Reject,
    Role,
    RunOver,
    Send,
    Started,
    Tell,
    Welcome,
)
from tests.core.builders import found, only, receive, tell

SETTINGS = MembershipSettings(heartbeat_interval_s=5, heartbeat_timeout_s=30)


def membership(settings: MembershipSettings = SETTINGS) -> Membership:
    return Membership("eu", Identity(run="run", model="m", datasets=("a", "b")), settings)


def join(
    node: Membership, name: str = "w", role: Role = "worker", *, now: float = 0.0
) -> list[Effect]:
    return receive(node, f"{name}.session", Join(role, "run", "m", ("a",)), now=now)


def silence(node: Membership, *, now: float) -> list[Effect]:
    return node.handle(DeadlineReached(), now=now)


class TestJoining:
    def test_is_welcomed_under_a_fence_that_the_server_hears_first(self) -> None:
        assert join(membership()) == [
            Tell("eu", MemberJoined("w", "worker", 1, ("a",))),
            Send("w.session", Welcome(1)),
        ]

    def test_fences_grow_strictly_over_all_members(self) -> None:
        node = membership()
        names = ["w0", "w1", "w0", "region", "w0"]
        fences = [only(join(node, name), Welcome).fence for name in names]
        assert fences == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize(
        ("message", "reason", "says"),
        [
            (Join("worker", "other", "m", ("a",)), "other_run", "'other'"),
            (Join("worker", "run", "n", ("a",)), "other_model", "name, shape or type"),
            (Join("worker", "run", "m", ("a", "c")), "other_dataset", "'c'"),
        ],
    )
    def test_is_refused_what_is_not_of_this_run(
        self, message: Join, reason: str, says: str
    ) -> None:
        node = membership()
        (refusal,) = receive(node, "w.session", message)
        assert isinstance(refusal, Reject)
        assert (refusal.to, refusal.reason) == ("w.session", reason)
        assert says in refusal.detail
        assert node.state.members == {}
        assert node.state.last_fence == 0


class TestHeartbeats:
    def test_are_answered(self) -> None:
        node = membership()
        join(node)
        assert receive(node, "w.session", Heartbeat(1), now=9.0) == [
            Send("w.session", HeartbeatSeen(1))
        ]

    @pytest.mark.parametrize("fence", [1, 3])
    def test_under_another_fence_are_refused(self, fence: int) -> None:
        node = membership()
        join(node)
        join(node)
        refusal = only(receive(node, "w.session", Heartbeat(fence)), Reject)
        assert (refusal.reason, refusal.fence) == ("fenced", fence)

    def test_of_strangers_are_refused(self) -> None:
        assert only(receive(membership(), "w.session", Heartbeat(1)), Reject).reason == "fenced"

    def test_put_the_deadline_off(self) -> None:
        node = membership()
        join(node, "w0", now=0.0)
        join(node, "w1", now=2.0)
        assert node.next_deadline() == 30.0
        receive(node, "w0.session", Heartbeat(1), now=20.0)
        assert node.next_deadline() == 32.0

    def test_can_be_switched_off(self) -> None:
        node = membership(MembershipSettings(heartbeat_interval_s=0))
        join(node)
        assert node.next_deadline() is None


class TestSilence:
    def test_a_silent_worker_is_lost_and_fenced(self) -> None:
        node = membership()
        join(node, now=1.0)
        assert silence(node, now=30.9) == []
        effects = silence(node, now=31.0)
        assert found(effects, MemberLost, "eu") == [MemberLost("w")]
        refusal = only(effects, Reject, "w.session")
        assert (refusal.reason, refusal.fence) == ("fenced", 1)
        assert node.next_deadline() is None

    def test_a_lost_worker_must_join_again_and_gets_a_higher_fence(self) -> None:
        node = membership()
        join(node)
        silence(node, now=30.0)
        assert only(receive(node, "w.session", Heartbeat(1)), Reject).reason == "fenced"
        assert only(join(node), Welcome).fence == 2

    def test_a_silent_server_is_only_away(self) -> None:
        node = membership()
        join(node, "eu", "server")
        effects = silence(node, now=30.0)
        assert found(effects, MemberAway, "eu") == [MemberAway("eu")]
        assert not found(effects, MemberLost)
        assert node.next_deadline() is None
        back = receive(node, "eu.session", Heartbeat(1), now=5000.0)
        assert only(back, Reject).reason == "fenced"  # it comes back by joining

    def test_of_one_is_not_that_of_another(self) -> None:
        node = membership()
        join(node, "w0", now=0.0)
        join(node, "w1", now=10.0)
        assert found(silence(node, now=30.0), MemberLost) == [MemberLost("w0")]

    def test_a_restart_of_ours_is_no_silence_of_theirs(self) -> None:
        node = membership()
        join(node, now=0.0)
        node.handle(Started(), now=1000.0)
        assert node.next_deadline() == 1030.0


class TestLeaving:
    @pytest.mark.parametrize("fence", [0, 2])
    def test_under_another_fence_changes_nothing(self, fence: int) -> None:
        node = membership()
        join(node)
        assert receive(node, "w.session", Leave(fence)) == []
        assert "w" in node.state.members

    def test_a_goodbye_is_a_loss_at_once(self) -> None:
        node = membership()
        join(node)
        effects = receive(node, "w.session", Leave(1))
        assert found(effects, MemberLost, "eu") == [MemberLost("w")]

    def test_the_server_or_operator_may_raise_a_fence(self) -> None:
        node = membership()
        join(node, "eu", "server")
        effects = tell(node, RaiseFence("eu"))
        assert found(effects, MemberLost) == [MemberLost("eu")]
        assert only(receive(node, "eu.session", Heartbeat(1)), Reject).reason == "fenced"
        assert found(tell(node, RaiseFence("eu")), MemberLost) == [MemberLost("eu")]


def test_watches_nobody_when_the_run_is_over() -> None:
    node = membership()
    join(node)
    assert tell(node, RunOver()) == [Finish()]
    assert node.next_deadline() is None


@pytest.mark.parametrize("message", [Welcome(1), HeartbeatSeen(1)])
def test_what_is_not_for_it_changes_nothing(message: Message) -> None:
    assert receive(membership(), "w.session", message) == []
