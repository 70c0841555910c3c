"""What one simulated run is compared by, and the production core's account of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.messages import (
    Assignment,
    Message,
    NodeId,
    Push,
    PushAnswer,
    Received,
    Send,
    WorkerUpdate,
)
from halos.core.server import ServerSettings
from halos.core.tensors import NullState
from halos.core.topology import ROOT, Topology
from halos.runtime.dispatcher import Step
from halos.runtime.plan import RunPlan
from halos.runtime.virtual import VirtualClock
from halos.simulation.environment import Environment

Happening = tuple[str, float, int, int]  # kind, milliseconds, region or worker, n
Leased = tuple[int, int, int, int]  # worker, first sample, end sample, samples issued before


@dataclass
class Facts:
    """``events``: 'gps' = the root applies a push that reports n local steps; 'merge' = a region
    blends the answer in, n is its version then; 'ps' = a worker's n steps reach the root itself.
    """

    events: list[Happening] = field(default_factory=list)
    leases: list[Leased] = field(default_factory=list)
    end_ms: float = 0.0
    steps: int = 0
    in_flight: list[tuple[int, bool]] = field(default_factory=list)  # region, applied meanwhile


def sends(step: Step) -> list[tuple[NodeId, Message]]:
    return [(effect.to, effect.message) for effect in step.effects if isinstance(effect, Send)]


def production(
    environment: Environment,
    topology: Topology,
    *,
    local_steps: int,
    accumulation: int,
    batch_size: int = 64,
    total: int,
) -> Facts:
    """Drive the production core by the virtual clock, with no tensors, until ``total`` steps."""
    settings = ServerSettings(
        leasing=LeasingSettings(
            batch_size=batch_size,
            local_steps=local_steps,
            local_steps_of=topology.local_steps(local_steps),
            lease_block=0,
        ),
        accumulation=accumulation,
        stop_after_local_steps=total,
    )
    plan = RunPlan(
        topology=topology,
        identity=Identity(run="run", model="model", datasets=("text",)),
        membership=MembershipSettings(heartbeat_interval_s=0),
        samples={"text": None},
        server_settings=lambda name: settings,
        tensors=lambda name: NullState(),
    )
    driver = VirtualClock(plan.nodes(), environment.model_of(topology))
    facts = Facts()
    worker = {place.name: i for i, place in enumerate(topology.workers)}
    region = {place.name: i for i, place in enumerate(environment.regions)}

    def observe(step: Step) -> None:
        ms = step.time * 1e3
        match step.event:
            case Received(sender, Push(report=report)) if step.node == ROOT:
                facts.events.append(("gps", ms, region[sender], report.local_steps))
                facts.steps += report.local_steps
            case Received(_, PushAnswer()):
                version = step.subject.state.version
                facts.events.append(("merge", ms, region[step.node], version))
            case Received(sender, WorkerUpdate(local_steps=steps)) if step.node == ROOT:
                facts.events.append(("ps", ms, worker[sender], steps))
                facts.steps += steps
            case Received(_, WorkerUpdate()):
                cut = any(isinstance(sent, Push) for _, sent in sends(step))
                meanwhile = step.subject.state.push is not None and not cut
                facts.in_flight.append((region[step.node], meanwhile))
        for to, message in sends(step):
            if isinstance(message, Assignment):
                ((start, end),) = message.lease.ranges
                facts.leases.append((worker[to], start, end, message.lease.progress))

    driver.observers.append(observe)
    driver.start()
    assert driver.run()
    facts.end_ms = driver.now * 1e3
    return facts
