"""Who belongs to a server: join, heartbeat, fence, timeout.

Both ends are nodes of their own beside the server or worker that they serve, so that a long
``apply`` or a long round never delays a heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from halos.core.messages import (
    DeadlineReached,
    Effect,
    Event,
    FenceStale,
    Finish,
    Heartbeat,
    HeartbeatSeen,
    Join,
    Joined,
    Leave,
    LinkLost,
    MemberAway,
    MemberExpected,
    MemberJoined,
    MemberLost,
    NodeId,
    ParentLost,
    RaiseFence,
    Received,
    Refused,
    Reject,
    Role,
    RunOver,
    Send,
    Started,
    Tell,
    Told,
    Welcome,
)
from halos.core.settings import Settings

FENCED = "the fence was raised: join again"
NONE = 0  # a fence that is never issued
EPOCH_BITS = 32  # each start of a process issues fewer fences than this many bits count


class MembershipSettings(Settings):
    """``heartbeat_interval_s`` of 0 switches heartbeats and timeouts off (simulation)."""

    heartbeat_interval_s: float = Field(default=5.0, ge=0)
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    retry_s: float = Field(default=2.0, gt=0)


class Identity(Settings):
    """What must be equal on two machines before one may join the other."""

    run: str
    model: str  # ModelLayout.hash
    datasets: tuple[str, ...]  # content hashes or names


@dataclass(slots=True)
class Member:
    """Somebody who is here, or, with fence ``NONE``, expected to come back."""

    role: Role
    fence: int
    heard: float  # `now` of the last sign of life


@dataclass(slots=True)
class MembershipState:
    members: dict[NodeId, Member] = field(default_factory=dict)
    last_fence: int = NONE
    over: bool = False


class Membership:
    """The parent's end. Named ``<server>.members``; its children's sessions ``<node>.session``."""

    def __init__(
        self,
        server: NodeId,
        identity: Identity,
        settings: MembershipSettings,
        state: MembershipState | None = None,
    ) -> None:
        self.server = server
        self.identity = identity
        self.settings = settings
        self.state = state or MembershipState()

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        match event:
            case Started(epoch):
                return self._started(epoch, now)
            case Received(sender, Join() as join):
                return self._join(sender, join, now)
            case Received(sender, Heartbeat(fence)):
                return self._heartbeat(sender, fence, now)
            case Received(sender, Leave(fence)):
                return self._leave(member_of(sender), fence)
            case Told(MemberExpected(member_id, role)):
                self.state.members.setdefault(member_id, Member(role, NONE, now))
                return []
            case Told(RaiseFence(member_id)):
                return self._lose(member_id)
            case Told(RunOver()):
                self.state.over = True
                return [Finish()]
            case DeadlineReached():
                return self._time_out(now)
            case _:
                return []

    def next_deadline(self) -> float | None:
        if not self.settings.heartbeat_interval_s or self.state.over:
            return None
        heard = [m.heard for m in self.state.members.values()]
        return min(heard) + self.settings.heartbeat_timeout_s if heard else None

    def _started(self, epoch: int, now: float) -> list[Effect]:
        """After a restart every session is over; a restart of ours is no silence of theirs."""
        self.state.last_fence = max(self.state.last_fence, epoch << EPOCH_BITS)
        for member in self.state.members.values():
            member.fence, member.heard = NONE, now
        return []

    def _join(self, session: NodeId, join: Join, now: float) -> list[Effect]:
        member = member_of(session)
        known = self.state.members.get(member)
        if known is not None and known.role != join.role:
            detail = f"a {known.role} of this name is here already"
            return [Reject(session, "wrong_role", "join", None, detail)]
        if refusal := _refuse(session, join, self.identity):
            return [refusal]
        self.state.last_fence += 1
        fence = self.state.last_fence
        self.state.members[member] = Member(join.role, fence, now)
        return [
            Tell(self.server, MemberJoined(member, join.role, fence, join.datasets)),
            Send(session, Welcome(fence)),
        ]

    def _heartbeat(self, session: NodeId, fence: int, now: float) -> list[Effect]:
        member = self.state.members.get(member_of(session))
        if member is None or member.fence != fence:
            return [Reject(session, "fenced", "heartbeat", fence, FENCED)]
        member.heard = now
        return [Send(session, HeartbeatSeen(fence))]

    def _leave(self, member: NodeId, fence: int) -> list[Effect]:
        known = self.state.members.get(member)
        return self._lose(member) if known is not None and known.fence == fence else []

    def _lose(self, member: NodeId) -> list[Effect]:
        return [Tell(self.server, MemberLost(member)), *self._end_session(member)]

    def _end_session(self, member: NodeId) -> list[Effect]:
        known = self.state.members.pop(member, None)
        if known is None or known.fence == NONE:
            return []
        return [Reject(session_of(member), "fenced", "session", known.fence, FENCED)]

    def _time_out(self, now: float) -> list[Effect]:
        """A silent worker loses its lease; a silent region is only away: its work comes later."""
        effects: list[Effect] = []
        for name, member in list(self.state.members.items()):
            if now < member.heard + self.settings.heartbeat_timeout_s:
                continue
            if member.role == "worker":
                effects += self._lose(name)
            else:
                effects += [Tell(self.server, MemberAway(name)), *self._end_session(name)]
        return effects


@dataclass(slots=True)
class SessionState:
    fence: int | None = None
    next_try: float | None = None  # of a join or a heartbeat
    heard: float = 0.0
    over: bool = False


class Session:
    """The child's end: keeps its node joined to ``parent`` and tells it under which fence."""

    def __init__(
        self,
        node: NodeId,
        parent: NodeId,
        join: Join,
        settings: MembershipSettings,
        state: SessionState | None = None,
    ) -> None:
        self.node = node
        self.membership = membership_of(parent)
        self.join = join
        self.settings = settings
        self.state = state or SessionState()

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        match event:
            case Started():
                return self._started(now)
            case LinkLost() | Told(FenceStale()):
                return self._lost(now)
            case Received(_, Refused(reason="fenced", fence=fence)):
                return self._lost(now) if fence == self.state.fence else []
            case Received(_, Welcome(fence)):
                return self._welcome(fence, now)
            case Received(_, HeartbeatSeen(fence)):
                if fence == self.state.fence:
                    self.state.heard = now
                return []
            case Received(_, Refused()) | Told(RunOver()):
                self.state.over = True
                return [Finish()]
            case DeadlineReached():
                return self._deadline(now)
            case _:
                return []

    def next_deadline(self) -> float | None:
        return None if self.state.over else self.state.next_try

    def _started(self, now: float) -> list[Effect]:
        self.state.fence = None
        return [Finish()] if self.state.over else self._try(now)

    def _try(self, now: float) -> list[Effect]:
        self.state.next_try = now + self.settings.retry_s
        return [Send(self.membership, self.join)]

    def _welcome(self, fence: int, now: float) -> list[Effect]:
        if self.state.fence is not None and fence <= self.state.fence:
            return []
        self.state.fence = fence
        self.state.heard = now
        interval = self.settings.heartbeat_interval_s
        self.state.next_try = now + interval if interval else None
        return [Tell(self.node, Joined(fence))]

    def _lost(self, now: float) -> list[Effect]:
        """Join again; if we are at that already, then at the time set for the next try."""
        if self.state.fence is None or self.state.over:
            return []
        self.state.fence = None
        return [Tell(self.node, ParentLost()), *self._try(now)]

    def _deadline(self, now: float) -> list[Effect]:
        if self.state.over or self.state.next_try is None or now < self.state.next_try:
            return []
        if self.state.fence is None:
            return self._try(now)
        if now >= self.state.heard + self.settings.heartbeat_timeout_s:
            return self._lost(now)
        self.state.next_try = now + self.settings.heartbeat_interval_s
        return [Send(self.membership, Heartbeat(self.state.fence))]


def membership_of(server: NodeId) -> NodeId:
    return f"{server}.members"


def session_of(node: NodeId) -> NodeId:
    return f"{node}.session"


def member_of(session: NodeId) -> NodeId:
    return session.removesuffix(".session")


def _refuse(session: NodeId, join: Join, identity: Identity) -> Reject | None:
    if join.run != identity.run:
        detail = f"this is run {identity.run!r}, not {join.run!r}"
        return Reject(session, "other_run", "join", None, detail)
    if join.model != identity.model:
        detail = "the model's parameters differ in name, shape or type from the run's"
        return Reject(session, "other_model", "join", None, detail)
    unknown = sorted(set(join.datasets) - set(identity.datasets))
    if unknown:
        detail = f"data set {unknown[0]!r} is not the run's"
        return Reject(session, "other_dataset", "join", None, detail)
    return None
