"""Who is whose child: the tree of servers and workers."""

from __future__ import annotations

from dataclasses import dataclass

from halos.core.adaptation import local_steps_for
from halos.core.messages import NodeId

ROOT = "root"


@dataclass(frozen=True)
class ServerPlace:
    name: NodeId
    parent: NodeId | None


@dataclass(frozen=True)
class WorkerPlace:
    name: NodeId
    parent: NodeId
    speed: float = 1.0  # relative


@dataclass(frozen=True)
class Topology:
    """A tree. Parents come before their children; the first server is the root."""

    servers: tuple[ServerPlace, ...]
    workers: tuple[WorkerPlace, ...]

    def local_steps(self, local_steps: int) -> dict[NodeId, int]:
        """H of every worker, so that rounds take about equally long."""
        fastest = max(w.speed for w in self.workers)
        return {w.name: local_steps_for(local_steps, w.speed, fastest) for w in self.workers}
