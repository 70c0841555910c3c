"""Everything that a node can be told and everything that it can ask for.

Messages travel between nodes, notices between nodes of one process. Events go into
``Node.handle`` and effects come out of it; all are frozen, so they can be traced, compared
and replayed.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal, Protocol

from halos.core.frozen import frozen
from halos.core.samples import Block, Lease, Report
from halos.core.tensors import Payload, RefusalReason

NodeId = str
Role = Literal["worker", "server"]

# ---------------------------------------------------------------- messages, child to parent


@frozen
class Join:
    """Asks the parent's membership to be let in."""

    role: Role
    run: str
    model: str
    datasets: tuple[str, ...]


@frozen
class Heartbeat:
    fence: int


@frozen
class Leave:
    """A worker's goodbye: its lease may go to another at once."""

    fence: int


@frozen
class Ready:
    """A worker that joined says which lease it still trains on, if any."""

    fence: int
    lease: str | None


@frozen
class WorkerUpdate:
    """A finished lease. Keyed by ``lease``: sent again after a lost link, never applied twice."""

    lease: str
    fence: int
    base_version: int
    local_steps: int
    tokens: int
    loss: float
    norm: float  # of the pseudo-gradient, L2
    seconds: float
    payload: Payload = field(repr=False)


@frozen
class Resume:
    """A child server that joined says where it stands; ``tenure`` 0: with nothing to continue.

    It sends nothing else before this is answered: one a session.
    """

    fence: int
    tenure: int
    sequence: int  # of the push in flight, or of the last one answered
    in_flight: bool
    base_version: int
    granted: int = 0  # number of the last grant received
    pushed_under: int = 0  # the fence that the push in flight was sent with


@frozen
class BlockRequest:
    """``need`` samples are wanted at once, up to ``want`` would save asking again soon.

    Numbered from 1 in each tenure, one open at a time. Sent again under its number when the
    session is a new one or the need grew.
    """

    fence: int
    number: int
    need: int
    want: int


@frozen
class Push:
    """A region's accumulated change. Keyed by (sender, ``sequence``).

    ``holds``: the number of the model to which the answer may be a difference.
    """

    sequence: int
    fence: int
    base_version: int
    report: Report
    payload: Payload = field(repr=False)
    holds: int | None = None


# ---------------------------------------------------------------- messages, parent to child


@frozen
class Welcome:
    fence: int


@frozen
class HeartbeatSeen:
    fence: int


@frozen
class Assignment:
    """Fresh parameters and the next lease. ``answers`` is the lease id that it acknowledges."""

    number: int
    fence: int
    answers: str | None
    lease: Lease
    local_steps: int
    batch_size: int
    version: int
    payload: Payload = field(repr=False)


@frozen
class Receipt:
    """Acknowledges an update when there is no lease to go with it."""

    fence: int
    answers: str


@frozen
class Resumed:
    """Answer to :class:`Resume`.

    ``reset``: the child's state does not continue what the parent knows; it starts again from
    ``payload`` (``None``: from the model that every run begins with). Otherwise a push in flight
    was applied if there is a ``payload``, which answers it, and never was if there is none.
    """

    fence: int
    tenure: int
    sequence: int
    reset: bool
    version: int
    payload: Payload | None = field(repr=False)


@frozen
class Grant:
    """Answers the block request of the same number. May hold several blocks."""

    fence: int
    number: int
    blocks: tuple[Block, ...]


@frozen
class Drain:
    """Nothing is left to issue after grant number ``granted``, for now: push what there is."""

    fence: int
    granted: int = 0


@frozen
class PushAnswer:
    """Push ``sequence`` was applied; ``payload`` is the parent's current model.

    Or its difference to the model of the number ``against``, which the receiver holds.
    """

    sequence: int
    fence: int
    version: int
    payload: Payload = field(repr=False)
    against: int | None = None


@frozen
class Refused:
    """What a refused sender is told. ``key`` names the message: a lease id, a push sequence."""

    reason: RefusalReason
    key: str
    fence: int | None  # that the refused message carried
    detail: str


@frozen
class Stop:
    """The run is over."""


FromChild = Join | Heartbeat | Leave | Ready | WorkerUpdate | Resume | BlockRequest | Push
FromParent = (
    Welcome | HeartbeatSeen | Assignment | Receipt | Resumed | Grant | Drain | PushAnswer | Refused
    | Stop
)  # fmt: skip
Message = FromChild | FromParent

# ---------------------------------------------------------------- notices, within one process


@frozen
class Joined:
    """Session to its node: the parent let us in under this fence."""

    fence: int


@frozen
class ParentLost:
    """Session to its node: the parent does not answer; the session goes on trying."""


@frozen
class FenceStale:
    """Node to its session: the parent refused our fence; join again."""


@frozen
class MemberJoined:
    """Membership to its server: a child came, or came back, under a new fence."""

    member: NodeId
    role: Role
    fence: int
    datasets: tuple[str, ...]


@frozen
class MemberAway:
    """Membership to its server: the child server is silent; what it holds stays with it."""

    member: NodeId


@frozen
class MemberLost:
    """Membership to its server: the child's fence was raised; what it holds may be issued again."""

    member: NodeId


@frozen
class MemberExpected:
    """Server to membership, after a restart of both: give it up if it does not come back."""

    member: NodeId
    role: Role


@frozen
class RaiseFence:
    """Server or operator to membership: let nothing of this member in any more."""

    member: NodeId


@frozen
class RunOver:
    """Node to the session or membership beside it: nobody need be waited for any more."""


Notice = (
    Joined | ParentLost | FenceStale | MemberJoined | MemberAway | MemberLost | MemberExpected
    | RaiseFence | RunOver
)  # fmt: skip

# ---------------------------------------------------------------- events


@frozen
class Started:
    """The first event of every node's life, also after a restart from saved state.

    ``epoch`` must be above that of every earlier start of the same process, so that no fence is
    issued twice; 0 will do where a process starts once. A whole run that is captured between two
    events and goes on together with all that was under way is not restarted, and gets none.
    """

    epoch: int = 0


@frozen
class Received:
    sender: NodeId
    message: Message


@frozen
class Told:
    notice: Notice


@frozen
class DeadlineReached:
    """The time asked for with ``next_deadline`` has come."""


@frozen
class LinkLost:
    """The driver could not deliver to the parent, or lost the connection to it."""


@frozen
class LocalStepsDone:
    """Result of :class:`RunLocalSteps`: pseudo-gradient ``theta_start - theta_end``."""

    lease: str
    local_steps: int
    tokens: int
    loss: float  # mean over the round's tokens
    norm: float
    seconds: float
    payload: Payload = field(repr=False)


Event = Started | Received | Told | DeadlineReached | LinkLost | LocalStepsDone

# ---------------------------------------------------------------- effects


@frozen
class Send:
    to: NodeId
    message: Message


@frozen
class Tell:
    to: NodeId
    notice: Notice


@frozen
class Reject:
    """Refuse a peer's message: the driver tells the sender (:class:`Refused`) and counts it."""

    to: NodeId
    reason: RefusalReason
    key: str
    fence: int | None
    detail: str


@frozen
class RunLocalSteps:
    """Train ``local_steps`` inner steps of ``batch_size`` samples each, from ``payload``."""

    lease: Lease
    local_steps: int
    batch_size: int
    payload: Payload = field(repr=False)


@frozen
class Finish:
    """This node has nothing more to do."""


Effect = Send | Tell | Reject | RunLocalSteps | Finish


class Node(Protocol):
    """What decides. A driver feeds events in, carries effects out, and owns clock and wires."""

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """React to one event. ``now`` in seconds of any monotonic clock."""
        ...

    def next_deadline(self) -> float | None:
        """When, on ``now``'s clock, to send :class:`DeadlineReached`; asked after each event."""
        ...
