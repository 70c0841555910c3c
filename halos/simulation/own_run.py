"""A run of one's own, as a specification describes it, to be simulated before it is started."""

from __future__ import annotations

from halos.errors import UserError
from halos.runtime.prepare import prepare_model
from halos.simulation.environment import Environment, EnvironmentRegion
from halos.simulation.methods import Method, Servers
from halos.specification import RunSpecification, SyncTable

SITE = "coordinator"  # where the root is, and no worker
FAST_GBPS = 1000.0  # where the specification names no limit


def method_of_run(specification: RunSpecification) -> Method:
    """The settings of the run's own ``[sync]`` and ``[wire]``."""
    sync = specification.resolved_sync.model_dump()
    servers = Servers.of(SyncTable(**{"global": sync.pop("root"), **sync}))
    codec = specification.wire.regions
    return Method(specification.run.name, servers.model_copy(update={"up": codec, "down": codec}))


def environment_of_run(specification: RunSpecification, *, step_ms: float) -> Environment:
    """The run's regions and links; ``step_ms``: one local step on the fastest worker.

    Raises ``UserError`` for a tree of more than two levels, which is not simulated.
    """
    for region in specification.regions:
        if region.parent is not None:
            raise UserError(
                f'[[regions]] "{region.name}" parent: cannot be simulated yet; remove it, or name '
                "an environment"
            )
    if specification.root.workers:
        raise UserError("[root] workers: cannot be simulated yet; put them into a region")
    links = [specification.link_of(region.name) for region in specification.regions]
    rates = [
        link.rate_mbps / 1e3 if link is not None and link.rate_mbps is not None else FAST_GBPS
        for link in links
    ]
    trips = [link.rtt_ms if link is not None else 0.0 for link in links]
    inside = [FAST_GBPS]
    rows = [tuple(inside + rates)] + [
        tuple([rate] + [FAST_GBPS if a == b else min(rate, other) for b, other in enumerate(rates)])
        for a, rate in enumerate(rates)
    ]
    return Environment(
        name=specification.run.name,
        description="as the specification describes it",
        step_ms=step_ms,
        model_bytes=4 * prepare_model(specification).layout.numel,
        root_region=SITE,
        regions=(
            EnvironmentRegion(name=SITE, workers=()),
            *(EnvironmentRegion(name=r.name, workers=r.workers) for r in specification.regions),
        ),
        bandwidth_gbps=tuple(rows),
        latency_ms=max(trips) / 2,
    )
