"""Merging what a quorum has finished, after a window of grace (Decoupled DiLoCo, 2604.21428)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

import torch

from halos.core.fragments import Fragments
from halos.core.messages import LocalStepsDone, NodeId, PushAnswer, RunLocalSteps
from halos.core.samples import Lease
from halos.core.state import TorchState
from halos.core.tensors import NOTHING, NullState, TensorState
from halos.core.topology import ROOT
from halos.errors import Interrupted
from halos.runtime.dispatcher import Trainer
from halos.runtime.virtual import untrained
from halos.simulation.methods import Quorum
from halos.simulation.outcome import Activity, Outcome, Span
from halos.simulation.world import World

A_MODEL = PushAnswer(0, 0, 0, NOTHING)  # stands for whatever carries one: all weigh the same
GRACE_ENDS = ""


@dataclass(frozen=True)
class _Arrived:
    """A worker's change at the server. ``since``: when it arrived."""

    worker: NodeId
    done: LocalStepsDone
    base_version: int
    since: float


class QuorumRun:
    """Workers train, send their change to the one server, and wait to be part of a merge."""

    def __init__(self, world: World, settings: Quorum) -> None:
        self.world, self.settings = world, settings
        environment = world.experiment.environment
        topology = environment.star()
        self.model = environment.model_of(topology, world.experiment.seed)
        self.steps = topology.local_steps(settings.h)
        self.workers = [worker.name for worker in topology.workers]
        self.needed = max(1, round(settings.quorum * len(self.workers)))
        self.tensors, self.trainers = self._replicas()
        self.now = self.merged_at = self.computed_s = 0.0
        self.version = self.issued = self.tokens = self.local_steps = self.wide_area_bytes = 0
        self.staleness: list[int] = []
        self.waiting: list[_Arrived] = []
        self.merges_at: float | None = None
        self.lanes: dict[NodeId, list[Span]] = {name: [] for name in self.workers}
        self._heap: list[tuple[float, int, NodeId, RunLocalSteps | None, int]] = []
        self._order = count()

    def run(self) -> Outcome:
        for worker in self.workers:
            self._begin(worker, 0.0)
        while not self.world.stopped and not self.world.is_over(self.now, self.local_steps):
            try:
                self._step()
            except Interrupted:
                break
            self.world.progress(self.now, self.local_steps)
        return self._outcome()

    def _replicas(self) -> tuple[TensorState, dict[NodeId, Trainer]]:
        laboratory = self.world.laboratory
        if laboratory is None:
            return NullState(), dict.fromkeys(self.workers, untrained)
        replicas = {name: laboratory.trainer() for name in self.workers}
        for trainer in replicas.values():
            trainer.stop = self.world.stop
        state = TorchState.start(laboratory.start, self.settings.outer, has_parent=False)
        return state, {name: trainer.run for name, trainer in replicas.items()}

    def _begin(self, worker: NodeId, now: float) -> None:
        """Send the model and a lease; the change is back when it is computed and sent."""
        batch, steps = self.world.experiment.batch_size, self.steps[worker]
        progress = self.issued
        self.issued += steps * batch
        lease = Lease(f"{worker}/{progress}", "text", 0, ((progress, self.issued),), progress)
        job = RunLocalSteps(lease, steps, batch, self.tensors.publish())
        down = self.model.transfer_s(ROOT, worker, A_MODEL)
        compute = self.model.compute_s(worker, steps, now + down)
        up = self.model.transfer_s(worker, ROOT, A_MODEL)
        self._note(worker, now, now + down, "send")
        self._note(worker, now + down, now + down + compute, "compute")
        self._note(worker, now + down + compute, now + down + compute + up, "send")
        self.computed_s += compute
        self.wide_area_bytes += self.model.size_bytes(ROOT, worker, A_MODEL)
        self.wide_area_bytes += self.model.size_bytes(worker, ROOT, A_MODEL)
        at = now + down + compute + up
        heapq.heappush(self._heap, (at, next(self._order), worker, job, self.version))

    def _step(self) -> None:
        self.now, _, worker, job, base_version = heapq.heappop(self._heap)
        if job is None:
            if self.merges_at == self.now:
                self._merge()
            return
        done = self.trainers[worker](job)
        self.waiting.append(_Arrived(worker, done, base_version, self.now))
        if len(self.waiting) == len(self.workers):
            self._merge()
        elif len(self.waiting) >= self.needed and self.merges_at is None:
            self.merges_at = self.now + self.settings.grace * (self.now - self.merged_at)
            heapq.heappush(self._heap, (self.merges_at, next(self._order), GRACE_ENDS, None, 0))

    def _merge(self) -> None:
        arrived, self.waiting = self.waiting, []
        tokens = sum(a.done.tokens for a in arrived)
        changes = [(a.done.payload, a.done.tokens / tokens) for a in arrived]
        mean: list[torch.Tensor] = []
        for change, weight in changes:
            if isinstance(change, Fragments):
                weighted = [t * weight for t in change.tensors]
                mean = [m + w for m, w in zip(mean, weighted, strict=True)] if mean else weighted
        if mean:
            self.tensors.apply(Fragments(mean))
        self.staleness += [self.version - a.base_version for a in arrived]
        self.version += 1
        self.merged_at, self.merges_at = self.now, None
        self.tokens += tokens
        self.local_steps += sum(a.done.local_steps for a in arrived)
        if self.world.laboratory is not None:
            self.world.laboratory.measure_if_due(
                self._theta(), self.now, self.local_steps, self.tokens
            )
        for a in arrived:
            self._note(a.worker, a.since, self.now, "wait")
            self._begin(a.worker, self.now)

    def _note(self, worker: NodeId, start: float, end: float, activity: Activity) -> None:
        end = min(end, self.world.experiment.window_s)
        if start < end:
            self.lanes[worker].append(Span(start, end, activity))

    def _theta(self) -> Fragments:
        theta = self.tensors.publish()
        assert isinstance(theta, Fragments)
        return theta

    def _outcome(self) -> Outcome:
        staleness = self.staleness
        return self.world.outcome(
            finished=self.world.is_over(self.now, self.local_steps),
            elapsed_s=self.now,
            local_steps=self.local_steps,
            tokens=self.tokens,
            model=self._theta() if self.world.laboratory is not None else None,
            utilization=min(1.0, self.computed_s / max(1e-9, len(self.workers) * self.now)),
            wide_area_bytes=self.wide_area_bytes,
            delivered=1.0,
            mean_staleness=sum(staleness) / len(staleness) if staleness else None,
            max_staleness=max(staleness, default=None),
            lanes={name: tuple(spans) for name, spans in self.lanes.items()},
        )
