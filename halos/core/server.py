"""The parameter server: one class for every level of the tree.

The root has no parent and owns the run's samples; a local server pushes what it accumulated to
its parent and blends the answer in. Read ``_apply``, ``_maybe_push`` and ``_merge`` beside the
pseudocode of the HALoS paper (arXiv 2506.04531).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from halos.core.leasing import Child, Leasing, LeasingSettings, LeasingState
from halos.core.ledger import Pending
from halos.core.membership import FENCED, membership_of, session_of
from halos.core.messages import (
    Assignment,
    BlockRequest,
    DeadlineReached,
    Drain,
    Effect,
    Event,
    FenceStale,
    Finish,
    Grant,
    Joined,
    MemberJoined,
    MemberLost,
    NodeId,
    ParentLost,
    Push,
    PushAnswer,
    RaiseFence,
    Ready,
    Receipt,
    Received,
    Refused,
    Reject,
    Report,
    Resume,
    Resumed,
    Role,
    RunOver,
    Send,
    Stop,
    Tell,
    Told,
    WorkerUpdate,
)
from halos.core.settings import Settings
from halos.core.tensors import RefusalReason, TensorState


class ServerSettings(Settings):
    """What governs one server. ``stop_after_local_steps`` ends a comparison (DESIGN 4)."""

    leasing: LeasingSettings = LeasingSettings()
    accumulation: int = Field(default=32, ge=1)
    merge_weight: float = Field(default=0.25, gt=0, le=1)
    in_flight: Literal["drop", "carry"] = "drop"
    drain_timeout_s: float = Field(default=300.0, gt=0)
    stop_after_local_steps: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A push that the parent has not answered yet."""

    sequence: int
    report: Report


@dataclass(slots=True)
class ServerState:
    """Everything of a server that a checkpoint keeps, tensors apart."""

    leasing: LeasingState = field(default_factory=LeasingState)
    version: int = 0  # updates applied
    merged_version: int = 0  # version at the last merge
    base_version: int = 0  # parent's version that was merged last
    pending: Pending = field(default_factory=Pending)
    push: InFlight | None = None
    sequence: int = 0  # of the last push cut
    tenure: int = 0  # under which the parent knows this server's state
    fence: int | None = None  # issued by the parent; None while it is away
    ready: bool = False  # holds a model to hand out
    exhausted_at: float | None = None
    reported: Report = Report()  # totals over the run, ranges apart
    finished: bool = False


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
        self.tensors = tensors
        self.parent = parent
        self.state = state or ServerState(ready=parent is None)
        self.leasing = Leasing(name, settings.leasing, self.state.leasing)

    # ------------------------------------------------------------ events

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """React to the event; then finish, push and ask for samples if that is due."""
        if self.state.finished:
            return self._after_the_end(event)
        effects = self._react(event, now)
        if self.parent is None:
            return effects + self._maybe_finish()
        return effects + self._maybe_push() + self._maybe_ask(now)

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(sender, WorkerUpdate() as update):
                return self._worker_update(sender, update, now)
            case Received(sender, Push() as push):
                return self._push(sender, push, now)
            case Received(_, PushAnswer() as answer):
                return self._merge(answer)
            case Received(sender, BlockRequest() as request):
                return self._block_request(sender, request, now)
            case Received(_, Grant() as grant):
                return self._grant(grant, now)
            case Received(_, Drain(fence)):
                return self._drain(fence, now)
            case Received(sender, Ready() as ready):
                return self._ready(sender, ready, now)
            case Received(sender, Resume() as resume):
                return self._resume(sender, resume, now)
            case Received(_, Resumed() as resumed):
                return self._resumed(resumed, now)
            case Received(_, Refused() as refused):
                return self._refused(refused)
            case Received(_, Stop()):
                return self._finish()
            case Told(Joined(fence)):
                return self._joined(fence)
            case Told(ParentLost()):
                self.state.fence = None
                return []
            case Told(MemberJoined() as member):
                return self._member_joined(member, now)
            case Told(MemberLost(member_id)):
                return self._disown(member_id, now)
            case DeadlineReached():
                return self._drain_timeout(now)
            case _:
                return []

    def next_deadline(self) -> float | None:
        """When a child server that holds the run up at its end is given up (DESIGN 5)."""
        state = self.state
        if state.finished or state.exhausted_at is None:
            return None
        heard = [
            max(child.heard, state.exhausted_at)
            for name, child in self._children.items()
            if self._holds_up(name, child)
        ]
        return min(heard) + self.settings.drain_timeout_s if heard else None

    # ------------------------------------------------------------ the algorithm

    def _worker_update(self, worker: NodeId, update: WorkerUpdate, now: float) -> list[Effect]:
        if refusal := self._refuse_sender(worker, "worker", update.fence, update.lease):
            return [refusal]
        child = self._children[worker]
        if update.lease == child.answered:  # a repeat: same verdict, outstanding assignment again
            return self._assign(worker, answers=update.lease, now=now)
        if child.lease is None or update.lease != child.lease.id:
            detail = "this lease is not held by this worker any more"
            refusal = Reject(worker, "unknown_lease", update.lease, update.fence, detail)
            return [refusal, *self._assign(worker, now=now)]
        if reason := self.tensors.check(update.payload):
            detail = f"update of lease {update.lease} was not applied"
            refusal = Reject(worker, reason, update.lease, update.fence, detail)
            self.leasing.give_back(worker)
            return [refusal, *self._serve_all(now, worker)]
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
        return self._assign(worker, answers=update.lease, now=now)

    def _push(self, sender: NodeId, push: Push, now: float) -> list[Effect]:
        """A child server's accumulated change, applied like any update."""
        if refusal := self._refuse_sender(sender, "server", push.fence, str(push.sequence)):
            return [refusal]
        child = self._children[sender]
        if push.sequence == child.sequence:  # a repeat
            return [self._answer(sender, child)]
        if reason := self._refuse_push(sender, push):
            detail = f"push {push.sequence} was not applied; start again from the current model"
            refusal = Reject(sender, reason, str(push.sequence), push.fence, detail)
            return [refusal, *self._disown(sender, now), self._raise_fence(sender)]
        child.sequence, child.heard = push.sequence, now
        self.tensors.apply(push.payload)
        self._account(sender, push.report)
        return [self._answer(sender, child)]

    def _refuse_push(self, sender: NodeId, push: Push) -> RefusalReason | None:
        if push.sequence != self._children[sender].sequence + 1:
            return "out_of_sequence"
        ranges = (*push.report.contained, *push.report.dropped)
        if not self.leasing.state.ledger.holds(sender, ranges):
            return "not_granted"
        return self.tensors.check(push.payload)

    def _account(self, child: NodeId, report: Report) -> None:
        """Enter one applied update into the books."""
        state, ledger = self.state, self.state.leasing.ledger
        state.version += 1
        ledger.retire(child, report)
        state.reported = _totals(state.reported, report)
        if self.parent is not None:
            state.pending.add(report)
        else:
            ledger.credit(report)

    def _maybe_push(self) -> list[Effect]:
        """Push once K updates came since the last merge and no push is in flight.

        When nothing is left to issue, what there is goes at once.
        """
        state = self.state
        due = state.version >= state.merged_version + self.settings.accumulation
        if state.push is not None or not state.pending or not (due or self.leasing.exhausted):
            return []
        state.sequence += 1
        return self._cut()

    def _cut(self) -> list[Effect]:
        """Cut ``u = base - theta``; sent now, or when the parent is back."""
        state = self.state
        assert self.parent is not None
        state.push = InFlight(state.sequence, state.pending.to_report())
        state.pending = Pending()
        payload = self.tensors.cut()
        if state.fence is None:
            return []
        push = Push(state.sequence, state.fence, state.base_version, state.push.report, payload)
        return [Send(self.parent, push)]

    def _merge(self, answer: PushAnswer) -> list[Effect]:
        """Blend the parent's model in; what was applied since the cut is dropped or carried."""
        state = self.state
        if state.push is None or state.push.sequence != answer.sequence:
            return []  # a repeat of an answer that was merged
        carry = self.settings.in_flight == "carry" or self.leasing.exhausted
        self.tensors.blend(answer.payload, merge_weight=self.settings.merge_weight, carry=carry)
        if not carry:
            state.pending.drop()
        state.push = None
        state.merged_version = state.version
        state.base_version = answer.version
        return []

    # ------------------------------------------------------------ samples

    def _assign(self, worker: NodeId, *, answers: str | None = None, now: float) -> list[Effect]:
        """Send ``worker`` its outstanding lease, else a new one, else let it wait."""
        child = self._children[worker]
        if child.fence is None:
            return []
        lease = child.lease
        if lease is None and self.state.ready:
            lease = self.leasing.next_lease(worker, epoch=self.state.tenure, now=now)
            child.number += lease is not None
        if lease is None:
            receipt: list[Effect] = []
            if answers is not None:
                receipt.append(Send(worker, Receipt(child.fence, answers)))
            self._wait(worker, now)
            return receipt
        batch = self.settings.leasing.batch_size
        assignment = Assignment(
            number=child.number,
            fence=child.fence,
            answers=answers,
            lease=lease,
            local_steps=math.ceil(lease.samples / batch),
            batch_size=batch,
            version=self.state.version,
            payload=self.tensors.publish(),
        )
        return [Send(worker, assignment)]

    def _serve(self, child: NodeId, now: float) -> list[Effect]:
        """Give a child what it waits for, if it is here; else keep it waiting."""
        entry = self._children[child]
        if entry.role == "worker":
            return self._assign(child, now=now)
        if entry.request is None:
            return []
        grant = self.leasing.next_grant(child, now=now) if self.state.ready else None
        if grant is not None:
            return [Send(child, grant)]
        self._wait(child, now)
        over = self.state.ready and self.leasing.exhausted
        return [Send(child, Drain(entry.fence))] if over and entry.fence is not None else []

    def _serve_all(self, now: float, *first: NodeId) -> list[Effect]:
        """Samples came (back): serve everybody who waits, in order."""
        if not self.leasing.exhausted:
            self.state.exhausted_at = None
        waiting, self.leasing.state.waiting = self.leasing.state.waiting, []
        return [e for child in dict.fromkeys((*waiting, *first)) for e in self._serve(child, now)]

    def _wait(self, child: NodeId, now: float) -> None:
        """Note that ``child`` waits for samples."""
        waiting = self.leasing.state.waiting
        if child not in waiting:
            waiting.append(child)
        if self.state.ready and self.leasing.exhausted and self.state.exhausted_at is None:
            self.state.exhausted_at = now

    def _maybe_ask(self, now: float) -> list[Effect]:
        """Ask the parent for samples, when stock is short and no request is open."""
        assert self.parent is not None
        if self.state.fence is None or not self.state.ready:
            return []
        request = self.leasing.next_request(self.state.fence, now=now)
        return [Send(self.parent, request)] if request else []

    def _block_request(self, sender: NodeId, request: BlockRequest, now: float) -> list[Effect]:
        key = f"request {request.number}"
        if refusal := self._refuse_sender(sender, "server", request.fence, key):
            return [refusal]
        child = self._children[sender]
        if child.grant is not None and request.number <= child.grant.number:
            repeat = request.number == child.grant.number
            return [Send(sender, replace(child.grant, fence=request.fence))] if repeat else []
        child.request = request
        return self._serve(sender, now)

    def _grant(self, grant: Grant, now: float) -> list[Effect]:
        return self._serve_all(now) if self.leasing.receive(grant) else []

    def _drain(self, fence: int, now: float) -> list[Effect]:
        """The parent has nothing left: those who wait get the rest, or are told."""
        if fence != self.state.fence:
            return []
        self.leasing.state.drained = True
        return self._serve_all(now)

    def _drain_timeout(self, now: float) -> list[Effect]:
        """Reclaim what silent child servers hold at the end, in the step that fences them."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return []
        effects: list[Effect] = []
        for name, child in list(self._children.items()):
            since = max(child.heard, self.state.exhausted_at or now)
            if self._holds_up(name, child) and now >= since + self.settings.drain_timeout_s:
                effects += [self._raise_fence(name), *self._disown(name, now)]
        return effects

    def _holds_up(self, name: NodeId, child: Child) -> bool:
        held = self.leasing.state.ledger.held.get(name)
        return child.role == "server" and held is not None and held.total > 0

    # ------------------------------------------------------------ children come and go

    def _member_joined(self, member: MemberJoined, now: float) -> list[Effect]:
        child = self._children.get(member.member)
        if child is None:
            child = Child(member.role, member.fence, member.datasets)
            self._children[member.member] = child
        child.fence = member.fence
        child.datasets = member.datasets
        child.heard = now
        return []

    def _ready(self, worker: NodeId, ready: Ready, now: float) -> list[Effect]:
        if refusal := self._refuse_sender(worker, "worker", ready.fence, "ready"):
            return [refusal]
        lease = self._children[worker].lease
        if lease is not None and lease.id == ready.lease:
            return []  # it trains on it still
        return self._assign(worker, now=now)

    def _resume(self, sender: NodeId, resume: Resume, now: float) -> list[Effect]:
        """A child server is back: its state continues, or it starts again from our model."""
        if refusal := self._refuse_sender(sender, "server", resume.fence, "resume"):
            return [refusal]
        child = self._children[sender]
        answered = resume.sequence - resume.in_flight
        known = resume.tenure == child.tenure > 0
        if known and answered <= child.sequence <= resume.sequence:
            back = Resumed(
                resume.fence, child.tenure, child.sequence, False, self.state.version, None
            )
            applied = resume.in_flight and child.sequence == resume.sequence
            return [Send(sender, back), *([self._answer(sender, child)] if applied else [])]
        self.leasing.give_back(sender)
        child.tenure += 1
        same = resume.tenure == 0 and resume.base_version == self.state.version
        model = None if same else self.tensors.publish()
        back = Resumed(resume.fence, child.tenure, child.sequence, True, self.state.version, model)
        return [Send(sender, back), *self._serve_all(now)]

    def _disown(self, member: NodeId, now: float) -> list[Effect]:
        """Nothing of this child enters any more; what it holds is issued again."""
        child = self._children.get(member)
        if child is None:
            return []
        child.fence = None
        child.tenure += child.role == "server"
        self.leasing.give_back(member)
        return self._serve_all(now)

    def _raise_fence(self, member: NodeId) -> Effect:
        return Tell(membership_of(self.name), RaiseFence(member))

    def _refuse_sender(self, sender: NodeId, role: Role, fence: int, key: str) -> Reject | None:
        child = self._children.get(sender)
        if child is None:
            return Reject(sender, "unknown_sender", key, fence, "join first")
        if child.role != role:
            return Reject(sender, "wrong_role", key, fence, f"it joined as a {child.role}")
        if child.fence != fence:
            return Reject(sender, "fenced", key, fence, FENCED)
        return None

    def _answer(self, sender: NodeId, child: Child) -> Effect:
        assert child.fence is not None
        model = self.tensors.publish()
        return Send(sender, PushAnswer(child.sequence, child.fence, self.state.version, model))

    # ------------------------------------------------------------ the parent comes and goes

    def _joined(self, fence: int) -> list[Effect]:
        state = self.state
        state.fence = fence
        assert self.parent is not None
        in_flight = state.push is not None
        resume = Resume(fence, state.tenure, state.sequence, in_flight, state.base_version)
        return [Send(self.parent, resume)]

    def _resumed(self, resumed: Resumed, now: float) -> list[Effect]:
        state = self.state
        if resumed.fence != state.fence or self.parent is None:
            return []
        if resumed.reset:
            return self._start_again(resumed, now)
        effects: list[Effect] = []
        if state.push is not None and state.push.sequence > resumed.sequence:
            state.pending.add(state.push.report)
            effects += self._cut()  # under the same number, with all work since
        if (request := self.leasing.state.request) is not None:
            request = replace(request, fence=resumed.fence)
            self.leasing.state.request = request
            effects.append(Send(self.parent, request))
        return [*effects, *self._serve_all(now)]

    def _start_again(self, resumed: Resumed, now: float) -> list[Effect]:
        """Our state does not continue what the parent knows: take its model, drop the rest."""
        state = self.state
        void = state.ready or resumed.payload is not None
        if resumed.payload is not None:
            self.tensors.adopt(resumed.payload)
        state.tenure, state.sequence = resumed.tenure, resumed.sequence
        state.push, state.pending = None, Pending()
        state.merged_version, state.base_version = state.version, resumed.version
        state.ready, state.exhausted_at = True, None
        if void:
            self.leasing.forget()
        effects: list[Effect] = []
        for name, child in self._children.items():
            if void and child.role == "server" and child.fence is not None:
                child.fence = None
                child.tenure += 1
                effects.append(self._raise_fence(name))
        workers = [n for n, c in self._children.items() if c.role == "worker" and c.fence]
        return [*effects, *self._serve_all(now, *workers)]

    def _refused(self, refused: Refused) -> list[Effect]:
        if refused.fence != self.state.fence:
            return []  # of an earlier session
        return [Tell(session_of(self.name), FenceStale())]

    # ------------------------------------------------------------ the end

    def _maybe_finish(self) -> list[Effect]:
        ledger, limit = self.leasing.state.ledger, self.settings.stop_after_local_steps
        if limit is not None:
            over = self.state.reported.local_steps >= limit
        else:
            over = ledger.total is not None and ledger.credited.total == ledger.total
        return self._finish() if over else []

    def _finish(self) -> list[Effect]:
        self.state.finished = True
        stops: list[Effect] = [
            Send(name, Stop()) for name, child in self._children.items() if child.fence is not None
        ]
        beside: list[Effect] = [Tell(membership_of(self.name), RunOver())]
        if self.parent is not None:
            beside.append(Tell(session_of(self.name), RunOver()))
        return [*stops, *beside, Finish()]

    def _after_the_end(self, event: Event) -> list[Effect]:
        match event:
            case Received(sender, Ready() | Resume() | WorkerUpdate() | Push() | BlockRequest()):
                return [Send(sender, Stop())]
            case _:
                return []

    @property
    def _children(self) -> dict[NodeId, Child]:
        return self.leasing.state.children


def _totals(total: Report, report: Report) -> Report:
    """Sum of the counts of two reports; ranges are kept by the ledger."""
    return Report(
        updates=total.updates + report.updates,
        local_steps=total.local_steps + report.local_steps,
        tokens=total.tokens + report.tokens,
        loss_tokens=total.loss_tokens + report.loss_tokens,
    )
