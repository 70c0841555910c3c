"""Which child gets which samples next, and when to ask the parent for more (DESIGN 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pydantic import Field

from halos.core.ledger import Ledger
from halos.core.messages import BlockRequest, Grant, Lease, NodeId, Role
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

    def steps_for(self, worker: NodeId) -> int:
        return self.local_steps_of.get(worker, self.local_steps)


@dataclass(slots=True)
class Child:
    """What a server knows of one child. ``fence`` is ``None`` while nothing of it may enter."""

    role: Role
    fence: int | None
    datasets: tuple[str, ...]
    lease: Lease | None = None  # a worker's
    number: int = 0  # of its last assignment
    answered: str | None = None  # its last lease that was credited
    tenure: int = 0  # a server's; raised when its state stops counting
    sequence: int = 0  # of its last push that was applied
    heard: float = 0.0  # when that was
    request: BlockRequest | None = None
    grant: Grant | None = None


@dataclass(slots=True)
class LeasingState:
    ledger: Ledger = field(default_factory=Ledger)
    children: dict[NodeId, Child] = field(default_factory=dict)
    waiting: list[NodeId] = field(default_factory=list)  # for samples, in order
    leases_cut: int = 0
    request_number: int = 0
    request: BlockRequest | None = None  # open at the parent
    drained: bool = False  # the parent has nothing left to issue
    recent: float = 0.0  # samples issued over about the last horizon ...
    recent_at: float = 0.0  # ... as of then


class Leasing:
    """Books of issue over one server's state; the server turns its answers into messages."""

    def __init__(self, server: NodeId, settings: LeasingSettings, state: LeasingState) -> None:
        self.server = server
        self.settings = settings
        self.state = state

    @property
    def exhausted(self) -> bool:
        """Nothing can be issued here, and the parent (or the run) has nothing left either."""
        ledger = self.state.ledger
        own_source = bool(ledger.sections)
        return ledger.available() == 0 and (own_source or self.state.drained)

    def next_lease(self, worker: NodeId, *, epoch: int, now: float) -> Lease | None:
        """Cut a lease for ``worker``: a full round, or what is left once no more can come."""
        ledger, child = self.state.ledger, self.state.children[worker]
        need = self._lease_samples(worker)
        if not self._enough(need, child.datasets):
            return None
        blocks = ledger.take(need, worker, child.datasets)
        if not blocks:
            return None
        self.state.leases_cut += 1
        self._issued(sum(b.end - b.start for b in blocks), now)
        child.lease = Lease(
            id=f"{self.server}/{epoch}/{self.state.leases_cut}",
            dataset=blocks[0].dataset,
            origin=blocks[0].origin,
            ranges=tuple((b.start, b.end) for b in blocks),
            progress=blocks[0].progress,
        )
        return child.lease

    def next_grant(self, server: NodeId, *, now: float) -> Grant | None:
        """Answer ``server``'s open request, if there is enough for its need or no more can come.

        Of a bounded run, what is asked for ahead of need is at most half an equal share of the
        rest, or a round's worth: near the end no region sits on samples that another could train
        on. A request may have grown stale, so a need of none is answered with a round's worth too.
        """
        child = self.state.children[server]
        request, ledger = child.request, self.state.ledger
        if request is None or child.fence is None or not self._enough(request.need, child.datasets):
            return None
        servers = sum(c.role == "server" for c in self.state.children.values())
        available = ledger.available(child.datasets)
        ahead = available if math.isinf(available) else available // (2 * max(1, servers))
        a_round = self.settings.local_steps * self.settings.batch_size
        size = int(min(request.want, max(request.need, ahead, a_round)))
        blocks = ledger.take(size, server, child.datasets)
        if not blocks:
            return None
        self._issued(sum(b.end - b.start for b in blocks), now)
        child.request = None
        child.grant = Grant(child.fence, request.number, tuple(blocks))
        return child.grant

    def next_request(self, fence: int, *, now: float) -> BlockRequest | None:
        """Ask the parent for more, when needed and no request is open."""
        state = self.state
        if state.request is not None:
            return None
        stock = state.ledger.available()
        need = max(0, self._need_of_waiting() - int(stock))
        ahead = self._ahead(now)
        if not need and (stock > ahead / 2 or not ahead):
            return None
        state.request_number += 1
        want = max(need, need + ahead - int(stock))
        state.request = BlockRequest(fence, state.request_number, need, want)
        return state.request

    def receive(self, grant: Grant) -> bool:
        """Take a grant in, once. Whether it was new."""
        state = self.state
        if state.request is None or state.request.number != grant.number:
            return False
        state.ledger.receive(grant.blocks)
        state.request = None
        state.drained = False
        return True

    def give_back(self, child: NodeId) -> None:
        """What ``child`` held may be issued again; it waits for nothing any more."""
        self.state.ledger.give_back(child)
        entry = self.state.children[child]
        entry.lease = entry.request = entry.grant = None
        if child in self.state.waiting:
            self.state.waiting.remove(child)

    def forget(self) -> None:
        """The parent took back all samples: leases and grants cut from them are void."""
        state = self.state
        state.ledger.forget()
        state.waiting.clear()
        state.request, state.drained = None, False
        for child in state.children.values():
            child.lease = child.request = child.grant = None

    def _enough(self, need: int, datasets: tuple[str, ...]) -> bool:
        more_may_come = not self.state.ledger.sections and not self.state.drained
        return not more_may_come or self.state.ledger.available(datasets) >= max(1, need)

    def _lease_samples(self, worker: NodeId) -> int:
        return self.settings.steps_for(worker) * self.settings.batch_size

    def _need_of_waiting(self) -> int:
        need = 0
        for name in self.state.waiting:
            child = self.state.children[name]
            if child.role == "worker":
                need += self._lease_samples(name)
            elif child.request is not None:
                need += child.request.need
        return need

    def _ahead(self, now: float) -> int:
        """Samples to keep in stock beyond the need of the moment."""
        if self.settings.lease_block is not None:
            return self.settings.lease_block
        a_round = sum(
            self._lease_samples(name)
            for name, child in self.state.children.items()
            if child.role == "worker" and child.fence is not None
        )
        return max(a_round, math.ceil(self._decayed(now)))

    def _issued(self, samples: int, now: float) -> None:
        self.state.recent = self._decayed(now) + samples
        self.state.recent_at = now

    def _decayed(self, now: float) -> float:
        elapsed = max(0.0, now - self.state.recent_at)
        return self.state.recent * math.exp(-elapsed / self.settings.lease_horizon_s)
