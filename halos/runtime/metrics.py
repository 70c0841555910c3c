"""What a run is doing, gathered from the events that pass by."""

from __future__ import annotations

from dataclasses import dataclass, field

from halos.core.messages import (
    Effect,
    NodeId,
    Push,
    PushAnswer,
    Received,
    Reject,
    Send,
    WorkerUpdate,
)
from halos.core.server import Server
from halos.runtime.dispatcher import Step
from halos.runtime.trace import staleness

SMOOTHING = 0.1  # weight of the newest update in running means


@dataclass
class ServerMetrics:
    """Counts since the process started; ``loss`` and ``staleness`` are running means."""

    updates: int = 0
    tokens: int = 0
    pushes: int = 0
    merges: int = 0
    loss: float | None = None
    staleness: float | None = None
    max_staleness: int = 0


@dataclass
class RunMetrics:
    """An observer that keeps :class:`ServerMetrics` for every server that something happens at."""

    servers: dict[NodeId, ServerMetrics] = field(default_factory=dict)
    not_finite: dict[NodeId, int] = field(default_factory=dict)
    """How many updates of a worker in a row, up to its last, were refused as not finite."""

    def __call__(self, step: Step) -> None:
        if not isinstance(step.subject, Server) or not isinstance(step.event, Received):
            return
        entry = self.servers.setdefault(step.node, ServerMetrics())
        entry.pushes += sum(
            isinstance(effect, Send) and isinstance(effect.message, Push) for effect in step.effects
        )
        message = step.event.message
        if isinstance(message, PushAnswer):
            entry.merges += 1
        elif isinstance(message, WorkerUpdate):
            if self._refused(step.event.sender, step.effects):
                return
            entry.updates += 1
            entry.tokens += message.tokens
            entry.loss = _mean(entry.loss, message.loss)
        if (behind := staleness(step)) is not None:
            entry.staleness = _mean(entry.staleness, behind)
            entry.max_staleness = max(entry.max_staleness, behind)

    def _refused(self, worker: NodeId, effects: list[Effect]) -> bool:
        reasons = [e.reason for e in effects if isinstance(e, Reject) and e.to == worker]
        row = self.not_finite.get(worker, 0)
        self.not_finite[worker] = row + 1 if "non_finite" in reasons else 0
        return bool(reasons)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)
