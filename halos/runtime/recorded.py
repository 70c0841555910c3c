"""A specification beside the traces of its run: what these say of it, and how to replay them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halos.core.fragments import zeros
from halos.core.membership import MembershipSettings
from halos.core.messages import LocalStepsDone, Node, NodeId, RunLocalSteps
from halos.core.state import TorchState
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.errors import UserError
from halos.runtime.dispatcher import Trainer
from halos.runtime.plan import RunPlan
from halos.runtime.prepare import Prepared, roundings_of
from halos.runtime.replay import Replay
from halos.runtime.trace import RunFacts, Trace
from halos.training.inner import LocalTrainer
from halos.wire.roundtrip import RoundTrip


def facts_of(
    prepared: Prepared, membership: MembershipSettings, here: Topology | None = None
) -> RunFacts:
    """What a trace of this run says first; ``here`` are the servers and workers of this process."""
    here = here or prepared.specification.topology
    return RunFacts(
        run=prepared.identity.run,
        model=prepared.identity.model,
        datasets=prepared.identity.datasets,
        seed=prepared.specification.run.seed,
        servers={server.name: server.parent for server in here.servers},
        workers={worker.name: worker.parent for worker in here.workers},
        membership=membership,
    )


@dataclass
class RecordedRun:
    """A run of the same nodes and trainers as the recorded one, at its beginning."""

    replay: Replay
    trainers: dict[NodeId, LocalTrainer]


def recorded_run(prepared: Prepared, traces: Sequence[Trace]) -> RecordedRun:
    """Ready to be replayed. Each worker trains with as many threads as it did.

    Raises ``UserError`` if a trace is of another run, or does not say which it is of.
    """
    for trace in traces:
        _check(prepared, trace)
    facts = [start for trace in traces for start in trace.starts]
    topology, apart = _topology(prepared, facts), any(start.apart for start in facts)
    plan = RunPlan(
        topology=topology,
        identity=prepared.identity,
        membership=facts[0].membership,
        samples={prepared.identity.datasets[0]: prepared.total_samples},
        server_settings=lambda _: prepared.server_settings(),
        tensors=lambda name: TorchState.start(
            zeros(prepared.layout) if apart and name != ROOT else prepared.start,
            prepared.outer_settings(name),
            roundings_of(prepared.specification),
            has_parent=name != ROOT,
        ),
        apart=apart,
    )
    threads = {worker: start.threads for start in facts for worker in start.workers}
    trainers: dict[NodeId, LocalTrainer] = {}

    def trainer(worker: NodeId) -> Trainer:
        trainers[worker] = made = prepared.trainer()
        return _with_threads(made.run, threads.get(worker))

    def fresh(name: NodeId) -> tuple[Node, Trainer | None]:
        return plan.nodes()[name], trainer(name) if name in trainers else None

    return RecordedRun(
        Replay(
            plan.nodes(),
            {worker.name: trainer(worker.name) for worker in topology.workers},
            traces,
            isolate=RoundTrip(prepared.specification.resolved_wire.codecs),
            undo=lambda worker, lease: trainers[worker].undo(lease),
            fresh=fresh,
        ),
        trainers,
    )


def _check(prepared: Prepared, trace: Trace) -> None:
    identity = prepared.identity
    if not trace.starts:
        raise UserError(f"{trace.source}: does not say which run it is of; record it again")
    for start in trace.starts:
        for field, recorded, here in (
            ("[run] name", start.run, identity.run),
            ("[run] seed", start.seed, prepared.specification.run.seed),
            ("[model]", start.model, identity.model),
            ("[data]", start.datasets, identity.datasets),
        ):
            if recorded != here:
                raise UserError(
                    f"{trace.source}: is of a run with {field} {recorded}, and not {here}; "
                    "replay it with the specification that it was recorded with"
                )


def _topology(prepared: Prepared, facts: Sequence[RunFacts]) -> Topology:
    """That of the specification, with those who joined from elsewhere."""
    known = prepared.specification.topology
    servers = {server.name: server for server in known.servers}
    workers = {worker.name: worker for worker in known.workers}
    for start in facts:
        for server, above in start.servers.items():
            servers.setdefault(server, ServerPlace(server, above))
        for worker, parent in start.workers.items():
            if worker not in workers or workers[worker].parent != parent:
                workers[worker] = WorkerPlace(worker, parent)
    return Topology(tuple(servers.values()), tuple(workers.values()))


def _with_threads(train: Trainer, threads: int | None) -> Trainer:
    def trained(job: RunLocalSteps) -> LocalStepsDone:
        if threads is not None:
            torch.set_num_threads(threads)
        return train(job)

    return trained
