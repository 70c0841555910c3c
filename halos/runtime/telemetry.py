"""What a process tells of itself and of those below it, as JSON values, once a second or so."""

from __future__ import annotations

import os
from typing import Any

from halos.core.membership import NONE, Membership, membership_of
from halos.core.server import Server
from halos.runtime.children import Children
from halos.runtime.metrics import RunMetrics, ServerMetrics
from halos.runtime.networked import Networked
from halos.runtime.parent import ParentLink


def server_telemetry(
    server: Server,
    metrics: RunMetrics,
    driver: Networked,
    children: Children,
    link: ParentLink | None,
    elapsed_s: float,
) -> dict[str, Any]:
    """Of a server; at the root with the counts of the whole run."""
    state = server.state
    seen = metrics.servers.get(server.name, ServerMetrics())
    told: dict[str, Any] = {
        "role": "server",
        "name": server.name,
        "pid": os.getpid(),
        "open_s": driver.now,
        "version": state.version,
        "pushes": state.sequence,
        "in_flight": state.push is not None,
        "updates": seen.updates,
        "tokens": seen.tokens,
        "loss": seen.loss,
        "staleness": seen.staleness,
        "waiting": len(state.leasing.waiting),
        "queued": children.slots.waiting,
        "refusals": dict(driver.refusals),
        "children": {c.name: c.telemetry for c in children.here() if _is_member(driver, c.name)},
    }
    if link is not None:
        told["link"] = {
            "sent_bytes": link.traffic.sent,
            "received_bytes": link.traffic.received,
            "bits_per_s": link.deadlines.bits_per_s,
            "connected": link.connected,
        }
        return told
    ledger, reported = state.leasing.ledger, state.reported
    return told | {
        "elapsed_s": elapsed_s,
        "local_steps": reported.local_steps,
        "reported_tokens": reported.tokens,
        "issued": ledger.progress,
        "credited": ledger.credited.total,
        "delivered": ledger.delivered.total,
        "finished": state.finished,
    }


def _is_member(driver: Networked, child: str) -> bool:
    """Whether it was heard of within the heartbeat's timeout: a connection may outlive its peer."""
    membership = driver.nodes[membership_of(driver.main)]
    assert isinstance(membership, Membership)
    member = membership.state.members.get(child)
    return member is not None and member.fence != NONE


def worker_telemetry(
    name: str, driver: Networked, rounds: int, tokens: int, loss: float | None
) -> dict[str, Any]:
    return {
        "role": "worker",
        "name": name,
        "pid": os.getpid(),
        "open_s": driver.now,
        "busy_s": driver.busy_s,
        "rounds": rounds,
        "tokens": tokens,
        "loss": loss,
    }
