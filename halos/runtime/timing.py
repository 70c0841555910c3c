"""How long things take on the virtual clock."""

from __future__ import annotations

from typing import Protocol

from halos.core.messages import Message, NodeId
from halos.core.topology import Topology

TIE_BREAK_S = 1e-9  # a worker's round ends this much later for each worker before it


class TimeModel(Protocol):
    """How long things take on the virtual clock, in seconds."""

    def transfer_s(self, sender: NodeId, to: NodeId, message: Message) -> float: ...

    def compute_s(self, worker: NodeId, local_steps: int, now: float) -> float: ...


class UniformTime:
    """Messages take no time; a local step takes ``step_s`` on the fastest worker."""

    def __init__(self, topology: Topology, *, step_s: float = 1e-3) -> None:
        fastest = max(w.speed for w in topology.workers)
        self._step_s = {w.name: step_s / (w.speed / fastest) for w in topology.workers}
        self._tie_s = {w.name: i * TIE_BREAK_S for i, w in enumerate(topology.workers)}

    def transfer_s(self, sender: NodeId, to: NodeId, message: Message) -> float:
        return 0.0

    def compute_s(self, worker: NodeId, local_steps: int, now: float) -> float:
        return self._step_s[worker] * local_steps + self._tie_s[worker]
