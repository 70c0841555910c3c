"""The worker: takes a lease, has it trained, and keeps the result until it is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halos.core.frozen import frozen
from halos.core.membership import session_of
from halos.core.messages import (
    Assignment,
    Effect,
    Event,
    FenceStale,
    Finish,
    Joined,
    LocalStepsDone,
    Message,
    NodeId,
    ParentLost,
    Ready,
    Receipt,
    Received,
    Refused,
    RunLocalSteps,
    RunOver,
    Send,
    Started,
    Stop,
    Tell,
    Told,
    WorkerUpdate,
)


@frozen
class Round:
    """The lease in training and where it started from."""

    lease: str
    number: int
    base_version: int


@dataclass(slots=True)
class WorkerState:
    fence: int | None = None
    round: Round | None = None
    number: int = 0  # of the newest assignment seen
    finished: WorkerUpdate | None = None  # sent, or to be sent, and not acknowledged yet
    over: bool = False


class Worker:
    """Talks to one server only. Loses no finished update to a lost link or a server's restart."""

    def __init__(self, name: NodeId, parent: NodeId, state: WorkerState | None = None) -> None:
        self.name = name
        self.parent = parent
        self.state = state or WorkerState()

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        if self.state.over:
            return self._finish() if isinstance(event, Started) else []
        match event:
            case Received():
                return self._received(event.message)
            case LocalStepsDone():
                return self._done(event)
            case Told(Joined(fence)):
                return self._joined(fence)
            case Told(ParentLost()):
                self.state.fence = None
                return []
            case Started():
                self.state.fence, self.state.round = None, None  # its training ended with us
                return []
            case _:
                return []

    def _received(self, message: Message) -> list[Effect]:
        match message:
            case Assignment():
                return self._assignment(message)
            case Receipt(_, answers):
                self._acknowledge(answers)
                return []
            case Refused():
                return self._refused(message)
            case Stop():
                self.state.over = True
                return self._finish()
            case _:
                return []

    def _finish(self) -> list[Effect]:
        return [Tell(session_of(self.name), RunOver()), Finish()]

    def next_deadline(self) -> float | None:
        return None  # the session beside it watches the link

    def _joined(self, fence: int) -> list[Effect]:
        state = self.state
        state.fence = fence
        state.number = 0  # what we had may have to be sent again
        if state.finished is not None:
            state.finished = replace(state.finished, fence=fence)
            return [Send(self.parent, state.finished)]
        lease = state.round.lease if state.round else None
        return [Send(self.parent, Ready(fence, lease))]

    def _assignment(self, assignment: Assignment) -> list[Effect]:
        """Train on a new lease. An old or repeated assignment changes nothing."""
        state = self.state
        self._acknowledge(assignment.answers)
        lease = assignment.lease.id
        if assignment.fence != state.fence or assignment.number <= state.number:
            return []
        state.number = assignment.number
        trains = state.round is not None and state.round.lease == lease
        trained = state.finished is not None and state.finished.lease == lease
        if trains or trained:
            return []
        state.finished = None  # of a lease that is not ours any more
        state.round = Round(lease, assignment.number, assignment.version)
        return [
            RunLocalSteps(
                assignment.lease,
                assignment.local_steps,
                assignment.batch_size,
                assignment.payload,
            )
        ]

    def _done(self, done: LocalStepsDone) -> list[Effect]:
        state = self.state
        if state.round is None or state.round.lease != done.lease:
            return []  # this lease was taken from us meanwhile
        state.finished = WorkerUpdate(
            lease=done.lease,
            fence=state.fence or 0,
            base_version=state.round.base_version,
            local_steps=done.local_steps,
            tokens=done.tokens,
            loss=done.loss,
            norm=done.norm,
            seconds=done.seconds,
            payload=done.payload,
        )
        state.round = None
        return [Send(self.parent, state.finished)] if state.fence is not None else []

    def _acknowledge(self, lease: str | None) -> None:
        if self.state.finished is not None and self.state.finished.lease == lease:
            self.state.finished = None

    def _refused(self, refused: Refused) -> list[Effect]:
        """A stale fence keeps the update and joins again; any other refusal gives it up."""
        if refused.reason in ("fenced", "unknown_sender"):
            stale = refused.fence == self.state.fence
            return [Tell(session_of(self.name), FenceStale())] if stale else []
        self._acknowledge(refused.key)
        return []
