"""Where a run stands, as plain data: what the live table shows and what ``--json`` prints.

Needs no torch: ``halos status`` answers at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halos.core.messages import NodeId

if TYPE_CHECKING:
    from halos.runtime.local import LocalRun


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of the root's model. ``loss`` in nats a token."""

    elapsed_s: float
    local_steps: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """One server with workers or children. ``staleness`` is a running mean, in versions.

    ``workers`` are here, of ``expected``. ``sent_bytes`` and ``received_bytes`` of encoded tensors
    crossed the link to its parent since it started.
    """

    name: NodeId
    workers: int
    version: int
    pushes: int
    in_flight: bool
    tokens: int
    loss: float | None
    staleness: float | None
    waiting: int  # workers without samples
    expected: int = 0
    connected: bool = True
    sent_bytes: int = 0
    received_bytes: int = 0


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
    finished: bool = False


def status_told(told: Mapping[str, Any]) -> RunStatus:
    """From what a coordinator answers (see ``halos.runtime.telemetry``)."""
    everybody = list(_everybody(told))
    workers = [process for process in everybody if process["role"] == "worker"]
    here = {server["name"]: server for server in everybody if server["role"] == "server"}
    expected: Mapping[NodeId, int] = told["expected"]
    refusals: Counter[str] = Counter()
    for server in here.values():
        refusals.update(server["refusals"])
    open_s = sum(worker["open_s"] for worker in workers)
    tokens = sum(worker["tokens"] / max(1e-9, worker["open_s"]) for worker in workers)
    return RunStatus(
        name=told["run"],
        elapsed_s=told["elapsed_s"],
        local_steps=told["local_steps"],
        tokens=told["reported_tokens"],
        issued=told["issued"],
        credited=told["credited"],
        delivered=told["delivered"],
        total=told["total"],
        tokens_per_s=tokens,
        computing_share=sum(w["busy_s"] for w in workers) / open_s if open_s else None,
        root_version=told["version"],
        regions=tuple(region_told(name, expected[name], here.get(name)) for name in expected),
        refusals=dict(refusals),
        finished=told["finished"],
    )


def _everybody(told: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A process and all below it that have said something yet."""
    if told:
        yield told
        for child in told.get("children", {}).values():
            yield from _everybody(child)


def region_told(name: NodeId, expected: int, told: Mapping[str, Any] | None) -> RegionStatus:
    """From what a server tells of itself, to whomever; nothing while it is not there."""
    if told is None:
        return RegionStatus(name, 0, 0, 0, False, 0, None, None, 0, expected, connected=False)
    link = told.get("link", {})
    return RegionStatus(
        name=name,
        workers=sum(child.get("role") == "worker" for child in told["children"].values()),
        version=told["version"],
        pushes=told["pushes"],
        in_flight=told["in_flight"],
        tokens=told["tokens"],
        loss=told["loss"],
        staleness=told["staleness"],
        waiting=told["waiting"],
        expected=expected,
        sent_bytes=link.get("sent_bytes", 0),
        received_bytes=link.get("received_bytes", 0),
    )


def status_of(run: LocalRun) -> RunStatus:
    """Call it in the thread that runs the run, for example in its tick."""
    from halos.core.topology import ROOT

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
        finished=run.driver.finished,
    )


def _region(run: LocalRun, name: NodeId) -> RegionStatus:
    from halos.core.server import Server
    from halos.runtime.metrics import ServerMetrics

    server = run.driver.nodes[name]
    assert isinstance(server, Server)
    seen = run.metrics.servers.get(name, ServerMetrics())
    workers = sum(w.parent == name for w in run.prepared.specification.topology.workers)
    return RegionStatus(
        name=name,
        workers=workers,
        version=server.state.version,
        pushes=server.state.sequence,
        in_flight=server.state.push is not None,
        tokens=seen.tokens,
        loss=seen.loss,
        staleness=seen.staleness,
        waiting=len(server.state.leasing.waiting),
        expected=workers,
    )


def _computing_share(run: LocalRun) -> float | None:
    """Part of the workers' time that they computed in, in real time only.

    With more workers than cores they take turns, and a worker that waits for a core counts as
    computing.
    """
    from halos.runtime.inprocess import InProcess

    if not isinstance(run.driver, InProcess):
        return None
    busy = run.driver.busy_s
    return sum(busy.values()) / (run.open_s * len(busy)) if run.open_s > 0 and busy else None
