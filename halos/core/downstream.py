"""What a server does toward its children: who they are, and which samples they get."""

from __future__ import annotations

import math
from dataclasses import replace

from halos.core.leasing import Child, Leasing
from halos.core.membership import FENCED, membership_of
from halos.core.messages import (
    Assignment,
    BlockRequest,
    Drain,
    Effect,
    MemberExpected,
    MemberJoined,
    NodeId,
    RaiseFence,
    Ready,
    Receipt,
    Reject,
    Resume,
    Resumed,
    Role,
    Send,
    Stop,
    Tell,
)
from halos.core.server_state import ServerSettings, ServerState
from halos.core.tensors import TensorState


class Downstream:
    """One server's dealings with its children, workers and servers alike."""

    def __init__(
        self, name: NodeId, settings: ServerSettings, tensors: TensorState, state: ServerState
    ) -> None:
        self.name = name
        self.settings = settings
        self.tensors = tensors
        self.state = state
        self.leasing = Leasing(name, settings.leasing, state.leasing)
        self.children: dict[NodeId, Child] = state.leasing.children

    # ------------------------------------------------------------ children come and go

    def started(self, now: float) -> list[Effect]:
        """After a restart every session is over, and times are of another clock."""
        self.state.exhausted_at = None
        self.leasing.state.recent_at = now
        membership = membership_of(self.name)
        effects: list[Effect] = []
        for name, child in self.children.items():
            self.leasing.end_session(child)
            child.heard = now
            effects.append(Tell(membership, MemberExpected(name, child.role)))
        return effects

    def joined(self, member: MemberJoined, now: float) -> list[Effect]:
        child = self.children.get(member.member)
        effects: list[Effect] = []
        if child is None or child.role != member.role:
            effects = self.disown(member.member, now)
            child = Child(member.role, None, member.datasets, heard=now)
        elif not child.came_back:
            child.heard, child.came_back = now, True
        self.leasing.let_in(member.member, child, member.fence)
        child.datasets = member.datasets
        return effects

    def away(self, member: NodeId) -> list[Effect]:
        if (child := self.children.get(member)) is not None:
            self.leasing.end_session(child)
        return []

    def worker_ready(self, worker: NodeId, ready: Ready, now: float) -> list[Effect]:
        if refusal := self.refuse(worker, "worker", ready.fence, "ready"):
            return [refusal]
        lease = self.children[worker].lease
        if lease is not None and lease.id == ready.lease:
            return []  # it trains on it still
        return self.assign(worker, now=now)

    def resume(self, sender: NodeId, resume: Resume, now: float) -> list[Effect]:
        """A child server is back: its state continues, or it starts again from our model."""
        if refusal := self.refuse(sender, "server", resume.fence, "resume"):
            return [refusal]
        child = self.children[sender]
        if child.resumed:
            return []  # a repeat
        if not self.state.ready:
            child.resume = resume
            return []
        child.resumed, child.resume = True, None
        version = self.state.version
        if child.continued_by(resume):
            model = self.tensors.answer(sender, None)[0] if child.applied(resume) else None
            back = Resumed(resume.fence, child.tenure, child.sequence, False, version, model)
            return [Send(sender, back), *self._drain_if_dry(sender, child)]
        self.leasing.give_back(sender)
        child.tenure = max(child.tenure, resume.tenure) + 1
        same = resume.tenure == 0 and self.state.pristine
        model = None if same else self.tensors.answer(sender, None)[0]
        back = Resumed(resume.fence, child.tenure, child.sequence, True, version, model)
        return [Send(sender, back), *self.serve_all(now), *self._drain_if_dry(sender, child)]

    def disown(self, member: NodeId, now: float) -> list[Effect]:
        """Nothing of this child enters any more; what it holds is issued again."""
        child = self.children.get(member)
        if child is None:
            return []
        self.leasing.end_session(child)
        child.tenure += 1
        self.leasing.give_back(member)
        return self.serve_all(now)

    def expel(self, member: NodeId, now: float) -> list[Effect]:
        """Disown a child and have its fence raised, so that it comes back with nothing."""
        raised = Tell(membership_of(self.name), RaiseFence(member))
        return [*self.disown(member, now), raised]

    def void(self) -> list[Effect]:
        """The parent took back all samples, and with them what children hold of them."""
        self.leasing.forget()
        effects: list[Effect] = []
        for name, child in self.children.items():
            if child.role == "server" and child.resumed:
                self.leasing.end_session(child)
                effects.append(Tell(membership_of(self.name), RaiseFence(name)))
            if child.role == "server":
                child.tenure += 1
        return effects

    def open(self, now: float) -> list[Effect]:
        """There is a model to hand out: to those who have come already."""
        effects: list[Effect] = []
        for name, child in self.children.items():
            if child.resume is not None:
                effects += self.resume(name, child.resume, now)
        workers = (n for n, c in self.children.items() if c.role == "worker" and c.fence)
        return [*effects, *self.serve_all(now, *workers)]

    def refuse(self, sender: NodeId, role: Role, fence: int, key: str) -> Reject | None:
        """Why nothing of this sender may enter, if so."""
        child = self.children.get(sender)
        if child is None:
            return Reject(sender, "unknown_sender", key, fence, "join first")
        if child.role != role:
            return Reject(sender, "wrong_role", key, fence, f"it joined as a {child.role}")
        if child.fence != fence:
            return Reject(sender, "fenced", key, fence, FENCED)
        return None

    def stop(self) -> list[Effect]:
        return [Send(n, Stop()) for n, child in self.children.items() if child.fence is not None]

    # ------------------------------------------------------------ samples

    def assign(self, worker: NodeId, *, answers: str | None = None, now: float) -> list[Effect]:
        """Send ``worker`` its outstanding lease, else a new one, else let it wait."""
        child = self.children[worker]
        if child.fence is None:
            return []
        lease = child.lease
        if lease is None and self.state.ready:
            lease = self.leasing.next_lease(worker, now=now)
        if lease is None:
            self.leasing.wait(worker)
            return [Send(worker, Receipt(child.fence, answers))] if answers is not None else []
        assignment = Assignment(
            number=child.number,
            fence=child.fence,
            answers=answers,
            lease=lease,
            local_steps=math.ceil(lease.samples / self.leasing.batch_size),
            batch_size=self.leasing.batch_size,
            version=self.state.version,
            payload=self.tensors.publish(),
        )
        return [Send(worker, assignment)]

    def block_request(self, sender: NodeId, request: BlockRequest, now: float) -> list[Effect]:
        key = f"request {request.number}"
        if refusal := self.refuse(sender, "server", request.fence, key):
            return [refusal]
        child = self.children[sender]
        if child.grant is not None and request.number <= child.grant.number:
            repeat = request.number == child.grant.number
            return [Send(sender, replace(child.grant, fence=request.fence))] if repeat else []
        if child.request is None or request.need >= child.request.need:
            child.request = request
        return self._serve(sender, now)

    def serve_all(self, now: float, *first: NodeId) -> list[Effect]:
        """Samples came (back): serve everybody who waits, in order."""
        waiting, self.leasing.state.waiting = self.leasing.state.waiting, []
        return [e for child in dict.fromkeys((*waiting, *first)) for e in self._serve(child, now)]

    def _serve(self, name: NodeId, now: float) -> list[Effect]:
        """Give a child what it waits for, if it is here; else keep it waiting."""
        child = self.children[name]
        if child.role == "worker":
            return self.assign(name, now=now)
        if child.request is None or not child.resumed:
            return []
        if (grant := self.leasing.next_grant(name, now=now)) is not None:
            return [Send(name, grant)]
        self.leasing.wait(name)
        return self._drain_if_dry(name, child)

    # ------------------------------------------------------------ nothing is left

    def note_exhaustion(self, now: float) -> list[Effect]:
        """When nothing is left to issue, say so to every child server, once."""
        state = self.state
        if not self.leasing.exhausted:
            state.exhausted_at = None
            return []
        if not self.leasing.somebody_idle:
            state.exhausted_at = None
        elif state.exhausted_at is None:
            state.exhausted_at = now
        return [
            effect
            for name, child in self.children.items()
            if child.resumed and not child.drained
            for effect in self._drain_if_dry(name, child)
        ]

    def _drain_if_dry(self, name: NodeId, child: Child) -> list[Effect]:
        if child.fence is None or not self.leasing.dry_for(child):
            return []
        child.drained = True
        return [Send(name, Drain(child.fence, child.granted))]

    def next_deadline(self) -> float | None:
        """When a child server that holds the run up at its end is given up (DESIGN 5)."""
        if self.state.exhausted_at is None:
            return None
        times = [
            self._patience_ends(child, self.state.exhausted_at)
            for name, child in self.children.items()
            if self._holds_up(name, child)
        ]
        return min(times, default=None)

    def reclaim(self, now: float) -> list[Effect]:
        """Take back what silent child servers hold at the end, in the step that fences them."""
        since = self.state.exhausted_at
        if since is None:
            return []
        late = [
            name
            for name, child in self.children.items()
            if self._holds_up(name, child) and now >= self._patience_ends(child, since)
        ]
        effects: list[Effect] = []
        for name in late:
            self.children[name].reclaims += 1
            effects += self.expel(name, now)
        return effects

    def _holds_up(self, name: NodeId, child: Child) -> bool:
        held = self.leasing.ledger.held.get(name)
        return child.role == "server" and held is not None and held.total > 0

    def _patience_ends(self, child: Child, since: float) -> float:
        """Each time doubled, so that a region with slow rounds or a slow link gets to its end."""
        patience = self.settings.drain_timeout_s * (1 << child.reclaims)
        return max(child.heard, since) + patience
