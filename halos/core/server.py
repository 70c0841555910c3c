"""The parameter server: one class for every level of the tree.

The root has no parent and owns the run's samples; a local server pushes what it accumulated to
its parent and blends the answer in. Beside the pseudocode of the HALoS paper (arXiv 2506.04531)
read ``_worker_update``, then :meth:`Upstream.push`, ``_push`` and :meth:`Upstream.merge`.
"""

from __future__ import annotations

from math import isfinite

from halos.core.downstream import Downstream
from halos.core.ledger import totals
from halos.core.membership import membership_of, session_of
from halos.core.messages import (
    BlockRequest,
    DeadlineReached,
    Drain,
    Effect,
    Event,
    Finish,
    Grant,
    Joined,
    MemberAway,
    MemberJoined,
    MemberLost,
    Message,
    NodeId,
    Notice,
    ParentLost,
    Push,
    PushAnswer,
    Ready,
    Received,
    Refused,
    Reject,
    Resume,
    Resumed,
    RunOver,
    Send,
    Started,
    Stop,
    Tell,
    Told,
    WorkerUpdate,
)
from halos.core.samples import Report
from halos.core.server_state import InFlight, ServerSettings, ServerState
from halos.core.tensors import RefusalReason, TensorState
from halos.core.upstream import Upstream

__all__ = ["InFlight", "Server", "ServerSettings", "ServerState"]


class Server:
    """Applies children's updates, hands out parameters and leases, exchanges with a parent."""

    def __init__(
        self,
        name: NodeId,
        settings: ServerSettings,
        tensors: TensorState,
        parent: NodeId | None = None,
        state: ServerState | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.stop_after_local_steps = settings.stop_after_local_steps  # read at every event
        self.tensors = tensors
        self.parent = parent
        self.state = state or ServerState(ready=parent is None)
        self.downstream = Downstream(name, settings, tensors, self.state)
        self.leasing = self.downstream.leasing
        self.upstream = Upstream(parent, self.downstream) if parent is not None else None

    # ------------------------------------------------------------ events

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """React to the event; then finish, push and ask for samples if that is due."""
        if self.state.finished:
            return self._after_the_end(event)
        return self._react(event, now) + self._settle(now)

    def next_deadline(self) -> float | None:
        """When a child server that holds the run up at its end is given up (DESIGN 5)."""
        if self.state.finished or self.state.exhausted_at is None:
            return None
        return self.downstream.next_deadline()

    def _settle(self, now: float) -> list[Effect]:
        """What the state as it is now calls for, whatever the event was."""
        if self.state.finished:
            return []
        effects = self.downstream.note_exhaustion(now)
        if self.upstream is None:
            return effects + self._finish_if_over()
        return effects + self.upstream.push() + self.upstream.ask(now)

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received():
                if self.upstream is not None and event.sender == self.parent:
                    return self._from_parent(self.upstream, event.message, now)
                return self._from_child(event.sender, event.message, now)
            case Told(notice):
                return self._told(notice, now)
            case DeadlineReached():
                return self.downstream.reclaim(now)
            case Started():
                self.state.fence, self.state.resumed = None, False
                return self.downstream.started(now)
            case _:
                return []

    def _from_child(self, sender: NodeId, message: Message, now: float) -> list[Effect]:
        match message:
            case WorkerUpdate():
                return self._worker_update(sender, message, now)
            case BlockRequest():
                return self.downstream.block_request(sender, message, now)
            case Push():
                return self._push(sender, message, now)
            case Ready():
                return self.downstream.worker_ready(sender, message, now)
            case Resume():
                return self.downstream.resume(sender, message, now)
            case _:
                return []

    def _from_parent(self, upstream: Upstream, message: Message, now: float) -> list[Effect]:
        match message:
            case Grant():
                return upstream.granted(message, now)
            case PushAnswer():
                return upstream.merge(message)
            case Drain():
                return upstream.drain(message, now)
            case Resumed():
                return upstream.resumed(message, now)
            case Refused():
                return upstream.refused(message)
            case Stop():
                return self._finish()
            case _:
                return []

    def _told(self, notice: Notice, now: float) -> list[Effect]:
        match notice:
            case MemberJoined():
                return self.downstream.joined(notice, now)
            case MemberAway(member):
                return self.downstream.away(member)
            case MemberLost(member):
                return self.downstream.disown(member, now)
            case Joined(fence) if self.upstream is not None:
                return self.upstream.joined(fence)
            case ParentLost():
                self.state.fence, self.state.resumed = None, False
                return []
            case _:
                return []

    # ------------------------------------------------------------ the algorithm

    def _worker_update(self, worker: NodeId, update: WorkerUpdate, now: float) -> list[Effect]:
        downstream = self.downstream
        if refusal := downstream.refuse(worker, "worker", update.fence, update.lease):
            return [refusal]
        child = downstream.children[worker]
        if update.lease == child.answered:  # a repeat: same verdict, outstanding assignment again
            return downstream.assign(worker, answers=update.lease, now=now)
        if child.lease is None or update.lease != child.lease.id:
            detail = "this lease is not held by this worker any more"
            refusal = Reject(worker, "unknown_lease", update.lease, update.fence, detail)
            return [refusal, *downstream.assign(worker, now=now)]
        if reason := self._refuse_update(update):
            detail = f"update of lease {update.lease} was not applied"
            refusal = Reject(worker, reason, update.lease, update.fence, detail)
            self.leasing.give_back(worker)
            return [refusal, *downstream.serve_all(now, worker)]
        report = Report(
            updates=1,
            local_steps=update.local_steps,
            tokens=update.tokens,
            loss_tokens=update.loss * update.tokens,
            contained=child.lease.ranges,
        )
        child.lease, child.answered = None, update.lease
        self.tensors.apply(update.payload)
        self._account(worker, report)
        return downstream.assign(worker, answers=update.lease, now=now)

    def _push(self, sender: NodeId, push: Push, now: float) -> list[Effect]:
        """A child server's accumulated change, applied like any update."""
        downstream = self.downstream
        if refusal := downstream.refuse(sender, "server", push.fence, str(push.sequence)):
            return [refusal]
        child = downstream.children[sender]
        if push.sequence < child.sequence:
            return []  # a repeat of one whose answer arrived
        if push.sequence > child.sequence:  # else a repeat, which is only answered
            if reason := self._refuse_push(sender, push):
                detail = f"push {push.sequence} was not applied; start again from the current model"
                refusal = Reject(sender, reason, str(push.sequence), push.fence, detail)
                return [refusal, *downstream.expel(sender, now)]
            child.sequence, child.pushed_under = push.sequence, push.fence
            child.heard, child.came_back = now, False
            self.tensors.apply(push.payload)
            self._account(sender, push.report)
        model, against = self.tensors.answer(sender, push.holds)
        version = self.state.version
        return [Send(sender, PushAnswer(push.sequence, push.fence, version, model, against))]

    def _refuse_update(self, update: WorkerUpdate) -> RefusalReason | None:
        if not (isfinite(update.loss) and isfinite(update.norm)):
            return "non_finite"
        return self.tensors.check(update.payload)

    def _refuse_push(self, sender: NodeId, push: Push) -> RefusalReason | None:
        if push.sequence != self.downstream.children[sender].sequence + 1:
            return "out_of_sequence"
        ranges = (*push.report.contained, *push.report.dropped)
        if not self.leasing.state.ledger.holds(sender, ranges):
            return "not_granted"
        if not isfinite(push.report.loss_tokens):
            return "non_finite"
        return self.tensors.check(push.payload)

    def _account(self, child: NodeId, report: Report) -> None:
        """Enter one applied update into the books."""
        state, ledger = self.state, self.leasing.state.ledger
        state.version += 1
        state.pristine = False
        ledger.retire(child, report)
        state.reported = totals(state.reported, report)
        if self.upstream is not None:
            state.pending.add(report)
        else:
            ledger.credit(report)

    # ------------------------------------------------------------ the end

    def _finish_if_over(self) -> list[Effect]:
        """The run ends when every sample is credited, or at the steps that a comparison takes."""
        limit = self.stop_after_local_steps
        if limit is not None and self.state.reported.local_steps >= limit:
            return self._finish()
        return self._finish() if self.leasing.state.ledger.all_credited else []

    def _finish(self) -> list[Effect]:
        self.state.finished = True
        beside: list[Effect] = [Tell(membership_of(self.name), RunOver())]
        if self.parent is not None:
            beside.append(Tell(session_of(self.name), RunOver()))
        return [*self.downstream.stop(), *beside, Finish()]

    def _after_the_end(self, event: Event) -> list[Effect]:
        match event:
            case Received(sender, Ready() | Resume() | WorkerUpdate() | Push() | BlockRequest()):
                return [Send(sender, Stop())]
            case Started():
                return self._finish()
            case _:
                return []
