"""Where a run stands, as plain data: what the live table shows and what ``--json`` prints."""

from __future__ import annotations

from dataclasses import dataclass

from halos.core.messages import NodeId
from halos.core.server import Server
from halos.core.topology import ROOT
from halos.runtime.inprocess import InProcess
from halos.runtime.local import LocalRun
from halos.runtime.metrics import ServerMetrics


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """One server with workers or children. ``staleness`` is a running mean, in versions."""

    name: NodeId
    workers: int
    version: int
    pushes: int
    in_flight: bool
    tokens: int
    loss: float | None
    staleness: float | None
    waiting: int  # workers without samples


@dataclass(frozen=True, slots=True)
class RunStatus:
    """``credited`` and ``delivered`` count samples, as of the root (DESIGN 5)."""

    name: str
    elapsed_s: float
    local_steps: int
    tokens: int
    issued: int
    credited: int
    delivered: int
    total: int
    tokens_per_s: float  # since this process began
    computing_share: float | None
    root_version: int
    regions: tuple[RegionStatus, ...]
    refusals: dict[str, int]


def status_of(run: LocalRun) -> RunStatus:
    """Call it in the thread that runs the run, for example in its tick."""
    root = run.root.state
    ledger = root.leasing.ledger
    topology = run.prepared.specification.topology
    return RunStatus(
        name=run.prepared.specification.run.name,
        elapsed_s=run.elapsed_s,
        local_steps=root.reported.local_steps,
        tokens=root.reported.tokens,
        issued=ledger.progress,
        credited=ledger.credited.total,
        delivered=ledger.delivered.total,
        total=run.prepared.total_samples,
        tokens_per_s=sum(s.tokens for s in run.metrics.servers.values()) / max(1e-9, run.open_s),
        computing_share=_computing_share(run),
        root_version=root.version,
        regions=tuple(
            _region(run, place.name)
            for place in topology.servers
            if place.name != ROOT or any(w.parent == ROOT for w in topology.workers)
        ),
        refusals=dict(run.driver.refusals),
    )


def _region(run: LocalRun, name: NodeId) -> RegionStatus:
    server = run.driver.nodes[name]
    assert isinstance(server, Server)
    seen = run.metrics.servers.get(name, ServerMetrics())
    return RegionStatus(
        name=name,
        workers=sum(w.parent == name for w in run.prepared.specification.topology.workers),
        version=server.state.version,
        pushes=server.state.sequence,
        in_flight=server.state.push is not None,
        tokens=seen.tokens,
        loss=seen.loss,
        staleness=seen.staleness,
        waiting=len(server.state.leasing.waiting),
    )


def _computing_share(run: LocalRun) -> float | None:
    """Part of the workers' time that they computed in, in real time only.

    With more workers than cores they take turns, and a worker that waits for a core counts as
    computing.
    """
    if not isinstance(run.driver, InProcess):
        return None
    busy = run.driver.busy_s
    return sum(busy.values()) / (run.open_s * len(busy)) if run.open_s > 0 and busy else None
