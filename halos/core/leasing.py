"""Which child gets which samples next, and when to ask the parent for more (DESIGN 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pydantic import Field

from halos.core.ledger import Ledger
from halos.core.messages import BlockRequest, Grant, NodeId, Resume, Role
from halos.core.samples import Lease
from halos.core.settings import Settings


class LeasingSettings(Settings):
    """How work is cut up.

    ``lease_block``: samples asked for at a time; 0 asks for each lease when it is due, ``None``
    keeps in stock what the last ``lease_horizon_s`` seconds used, and at least a round's worth.
    """

    batch_size: int = Field(default=8, ge=1)
    local_steps: int = Field(default=8, ge=1)
    local_steps_of: dict[NodeId, int] = Field(default_factory=dict)
    lease_horizon_s: float = Field(default=30.0, gt=0)
    lease_block: int | None = Field(default=None, ge=0)


@dataclass(slots=True)
class Child:
    """What a server knows of one child. ``fence`` is ``None`` while nothing of it may enter."""

    role: Role
    fence: int | None
    datasets: tuple[str, ...]
    # a worker's
    lease: Lease | None = None
    number: int = 0  # of its last assignment
    answered: str | None = None  # its last lease that was credited
    # a server's
    resumed: bool = False  # in this session
    resume: Resume | None = None  # to be answered once there is a model to hand out
    tenure: int = 0  # raised when its state stops counting
    sequence: int = 0  # of its last push that was applied
    pushed_under: int = 0  # the fence that this came with: tells cuts of one number apart
    heard: float = 0.0  # when that was, or when it came back for the first time since
    came_back: bool = False  # since then
    request: BlockRequest | None = None
    grant: Grant | None = None  # the last one
    drained: bool = False  # told that nothing is left
    reclaims: int = 0  # how often it held the run up at its end

    @property
    def granted(self) -> int:
        """Number of the last grant in this tenure."""
        return self.grant.number if self.grant is not None else 0

    def end_session(self) -> None:
        self.fence, self.resumed, self.resume, self.drained = None, False, None, False

    def continued_by(self, resume: Resume) -> bool:
        """Whether the child's state is what these books say of it.

        It is, but for one push that may have been applied or not and one grant that may have
        arrived or not; either side can have been set back further, by an older saved state.
        """
        answered = resume.sequence - resume.in_flight
        return (
            resume.tenure == self.tenure > 0
            and answered <= self.sequence <= resume.sequence
            and (not self.applied(resume) or resume.pushed_under == self.pushed_under)
            and resume.granted <= self.granted <= resume.granted + 1
        )

    def applied(self, resume: Resume) -> bool:
        """Whether a push of the number that is in flight was applied."""
        return resume.in_flight and resume.sequence == self.sequence


@dataclass(slots=True)
class LeasingState:
    ledger: Ledger = field(default_factory=Ledger)
    children: dict[NodeId, Child] = field(default_factory=dict)
    waiting: list[NodeId] = field(default_factory=list)  # for samples, in order
    request: BlockRequest | None = None  # open at the parent
    granted: int = 0  # number of the last grant received in this tenure
    drained_after: int | None = None  # the grant after which the parent has nothing left
    recent: float = 0.0  # samples issued over about the last horizon ...
    recent_at: float = 0.0  # ... as of then


@dataclass(frozen=True, slots=True)
class _Census:
    """What demand depends on of the children, until one of them comes or goes."""

    a_round: int  # samples of a round of all workers that are here
    servers_here: tuple[Child, ...]
    servers: int  # also those that are away


class Leasing:
    """Books of issue over one server's state; the server turns its answers into messages."""

    def __init__(self, server: NodeId, settings: LeasingSettings, state: LeasingState) -> None:
        self.server = server
        # Settings read at every event are kept here: to read one of a pydantic model costs more
        # than much of what is done with it.
        self.batch_size = settings.batch_size
        self.local_steps = settings.local_steps
        self.local_steps_of = settings.local_steps_of
        self.lease_block = settings.lease_block
        self.lease_horizon_s = settings.lease_horizon_s
        self.state = state
        self.ledger = state.ledger
        self._census: _Census | None = None

    # ------------------------------------------------------------ children come and go

    def let_in(self, name: NodeId, child: Child, fence: int) -> None:
        """A session of ``child`` begins, which may be a new one."""
        self.state.children[name] = child
        child.end_session()
        child.fence = fence
        self._census = None

    def end_session(self, child: Child) -> None:
        child.end_session()
        self._census = None

    def _count(self) -> _Census:
        """Taken once for many events: a server may have a thousand children."""
        children = self.state.children.items()
        here = [(name, child) for name, child in children if child.fence is not None]
        self._census = _Census(
            a_round=sum(self._round_of(n) for n, c in here if c.role == "worker"),
            servers_here=tuple(c for _, c in here if c.role == "server"),
            servers=sum(c.role == "server" for _, c in children),
        )
        return self._census

    # ------------------------------------------------------------ what is left

    @property
    def more_may_come(self) -> bool:
        """Whether the parent may grant more; the root has no parent and owns what there is."""
        after = self.state.drained_after
        drained = after is not None and after >= self.state.granted
        return not drained and not self.ledger.sections

    @property
    def exhausted(self) -> bool:
        """Nothing can be issued here, and the parent (or the run) has nothing left either."""
        return not self.more_may_come and not self.ledger.any_left

    @property
    def somebody_idle(self) -> bool:
        """Whether a child that is here has nothing to do for want of samples."""
        for name in self.state.waiting:
            child = self.state.children[name]
            asks = child.request is not None and child.request.need > 0
            if child.fence is not None and (child.role == "worker" or asks):
                return True
        return False

    @property
    def draining(self) -> bool:
        """Whether no further updates are to be waited for: somebody is idle, or all are."""
        if self.more_may_come:
            return False
        if not self.ledger.any_left and self.somebody_idle:
            return True
        children = self.state.children
        held = self.ledger.held.items()
        return not any(ranges.total and children[n].fence is not None for n, ranges in held)

    def dry_for(self, child: Child) -> bool:
        """Whether nothing is left that this child could be given."""
        return not self.more_may_come and not self.ledger.available(child.datasets)

    # ------------------------------------------------------------ to children

    def next_lease(self, worker: NodeId, *, now: float) -> Lease | None:
        """Cut a lease for ``worker``: a full round, or what is left once no more can come."""
        child = self.state.children[worker]
        need = self._round_of(worker)
        if not self._enough(need, child.datasets):
            return None
        blocks = self.ledger.take(need, worker, child.datasets)
        if not blocks:
            return None
        child.number += 1
        first = blocks[0]
        lease = Lease(
            id=f"{worker}/{child.fence}/{child.number}",
            dataset=first.dataset,
            origin=first.origin,
            ranges=tuple([(b.start, b.end) for b in blocks]),
            progress=first.progress,
        )
        child.lease = lease
        self._issued(lease.samples, now)
        return lease

    def next_grant(self, server: NodeId, *, now: float) -> Grant | None:
        """Answer ``server``'s open request, if there is enough for its need or no more can come.

        Of a bounded run, what is asked for ahead of need is at most half an equal share of the
        rest, or a round's worth: near the end no region sits on samples that another could train
        on.
        """
        child = self.state.children[server]
        request = child.request
        if request is None or child.fence is None or not self._enough(request.need, child.datasets):
            return None
        size = request.want
        if size > request.need:
            available = self.ledger.available(child.datasets)
            servers = (self._census or self._count()).servers
            share = size if math.isinf(available) else int(available) // (2 * servers)
            a_round = self.local_steps * self.batch_size
            size = min(size, max(request.need, share, a_round))
        blocks = self.ledger.take(size, server, child.datasets)
        if not blocks:
            return None
        self._issued(sum([b.end - b.start for b in blocks]), now)
        child.request, child.drained = None, False
        child.grant = Grant(child.fence, request.number, tuple(blocks))
        return child.grant

    def wait(self, child: NodeId) -> None:
        """Note that ``child`` waits for samples."""
        if child not in self.state.waiting:
            self.state.waiting.append(child)

    def give_back(self, child: NodeId) -> None:
        """What ``child`` held may be issued again; it waits for nothing any more."""
        self.ledger.give_back(child)
        entry = self.state.children[child]
        entry.lease = entry.request = entry.grant = None
        if child in self.state.waiting:
            self.state.waiting.remove(child)

    # ------------------------------------------------------------ from the parent

    def next_request(self, fence: int, *, now: float) -> BlockRequest | None:
        """Ask the parent for more when stock is short, or again when more is needed than asked."""
        state, request = self.state, self.state.request
        if request is not None and request.fence == fence and not state.waiting:
            return None
        need, want = self._wanted(now)
        if request is None:
            if not want:
                return None
            state.request = BlockRequest(fence, state.granted + 1, need, want)
        elif request.fence == fence and need <= request.need:
            return None
        else:
            need, want = max(need, request.need), max(want, request.want)
            state.request = BlockRequest(fence, request.number, need, want)
        return state.request

    def receive(self, grant: Grant) -> bool:
        """Take a grant in, once. Whether it was new."""
        state = self.state
        if state.request is None or state.request.number != grant.number:
            return False
        self.ledger.receive(grant.blocks)
        state.request = None
        state.granted = grant.number
        return True

    def forget(self) -> None:
        """The parent took back all samples: leases and grants cut from them are void."""
        state = self.state
        self.ledger.forget()
        state.waiting.clear()
        state.request, state.granted, state.drained_after = None, 0, None
        for child in state.children.values():
            child.lease = child.request = child.grant = None

    # ------------------------------------------------------------ how much

    def _round_of(self, worker: NodeId) -> int:
        """Samples of a full round of ``worker``."""
        return self.local_steps_of.get(worker, self.local_steps) * self.batch_size

    def _enough(self, need: int, datasets: tuple[str, ...]) -> bool:
        return not self.more_may_come or self.ledger.available(datasets) >= max(1, need)

    def _wanted(self, now: float) -> tuple[int, int]:
        """Samples that must come for those who wait, and that should come with them if any."""
        stock = self.ledger.stock
        need = self._short() if self.state.waiting else 0
        ahead = self._ahead(now)
        if not need and (stock > ahead / 2 or not ahead):
            return 0, 0
        return need, need + max(0, ahead - stock)

    def _short(self) -> int:
        """What those who wait need beyond the stock, as far as each of them could use it."""
        need, usable = 0, self.ledger.stock
        for name in self.state.waiting:
            child = self.state.children[name]
            if child.role == "worker":
                need += self._round_of(name)
            elif child.request is not None:
                need += child.request.need
            if usable:
                usable = min(usable, int(self.ledger.available(child.datasets)))
        return max(0, need - usable)

    def _ahead(self, now: float) -> int:
        """Samples to keep in stock beyond the need of the moment."""
        block = self.lease_block
        if block == 0:
            return 0
        census = self._census or self._count()
        passed_on = 0
        for child in census.servers_here:
            if child.request is not None:  # a branch without workers asks for nothing
                passed_on += child.request.want
        if block is not None:
            return block if census.a_round else passed_on
        return max(census.a_round, passed_on, round(self._decayed(now)))

    def _issued(self, samples: int, now: float) -> None:
        self.state.recent = self._decayed(now) + samples
        self.state.recent_at = now

    def _decayed(self, now: float) -> float:
        elapsed = now - self.state.recent_at
        if elapsed <= 0:
            return self.state.recent
        return self.state.recent * math.exp(-elapsed / self.lease_horizon_s)
