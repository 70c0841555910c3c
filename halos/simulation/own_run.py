"""A run of one's own, as a specification describes it, to be simulated before it is started."""

from __future__ import annotations

from collections.abc import Callable
from operator import add

from halos.errors import UserError
from halos.runtime.prepare import prepare_model
from halos.simulation.environment import Environment, EnvironmentRegion
from halos.simulation.methods import Method, Servers
from halos.specification import RunSpecification, SyncTable
from halos.wire.link import LinkSettings

SITE = "coordinator"  # where the root is, and no worker
FAST_GBPS = 1000.0  # where the specification names no limit
ROUND_TRIPS = 0.6  # measured: a push over 80 ms took 175 ms more than its bytes, there and back


def method_of_run(specification: RunSpecification) -> Method:
    """The settings of the run's own ``[sync]`` and ``[wire]``."""
    sync = specification.resolved_sync.model_dump()
    servers = Servers.of(SyncTable(**{"global": sync.pop("root"), **sync}))
    wire = specification.resolved_wire
    links = {"up": wire.up.codec, "down": wire.down.codec}
    return Method(specification.run.name, servers.model_copy(update=links))


def environment_of_run(
    specification: RunSpecification, *, step_ms: float, exchange_ms: float = 0.0
) -> Environment:
    """The run's regions and links. ``step_ms``: one local step on the fastest worker.

    ``exchange_ms``: what a worker waits for its server between two rounds.

    Raises ``UserError`` for a tree of more than two levels, which is not simulated.
    """
    regions = specification.regions
    for region in regions:
        if region.parent is not None:
            raise UserError(
                f'[[regions]] "{region.name}" parent: cannot be simulated yet; remove it, or name '
                "an environment"
            )
    if specification.root.workers:
        raise UserError("[root] workers: cannot be simulated yet; put them into a region")
    links = [LinkSettings(), *(specification.link_of(r.name) or LinkSettings() for r in regions)]
    gbps = [link.rate_mbps / 1e3 if link.rate_mbps is not None else FAST_GBPS for link in links]
    return Environment(
        name=specification.run.name,
        description="as the specification describes it",
        step_ms=step_ms,
        model_bytes=4 * prepare_model(specification).layout.numel,
        root_region=SITE,
        regions=(
            EnvironmentRegion(name=SITE, workers=()),
            *(EnvironmentRegion(name=r.name, workers=r.workers) for r in regions),
        ),
        bandwidth_gbps=_between(gbps, min, FAST_GBPS),
        round_trips=ROUND_TRIPS,
        latency_ms=_between([link.rtt_ms / 2 for link in links], add, exchange_ms / 2),
    )


def _between(
    links: list[float], both: Callable[[float, float], float], inside: float
) -> tuple[tuple[float, ...], ...]:
    """From each site to each, over both of their links."""
    return tuple(
        tuple(inside if a == b else both(one, other) for b, other in enumerate(links))
        for a, one in enumerate(links)
    )
