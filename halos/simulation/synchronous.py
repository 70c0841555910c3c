"""Methods in which everybody waits for everybody: DiLoCo, with dynamic local updates or without,
and data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.messages import NodeId, RunLocalSteps
from halos.core.samples import Lease
from halos.core.state import TorchState
from halos.core.tensors import NullState, TensorState
from halos.core.topology import WorkerPlace
from halos.errors import Interrupted
from halos.runtime.dispatcher import Trainer
from halos.runtime.virtual import untrained
from halos.simulation.methods import DataParallel, DiLoCo
from halos.simulation.outcome import Activity, Outcome, Span
from halos.simulation.ring import Ring
from halos.simulation.world import World

PLAIN = OuterSettings(rate=1.0)


@dataclass
class Clock:
    """Virtual time of a run in rounds, and what each worker did with it."""

    workers: Sequence[NodeId]
    window_s: float
    now: float = 0.0
    computed_s: float = 0.0
    lanes: dict[NodeId, list[Span]] = field(default_factory=dict)

    def round(self, compute_s: dict[NodeId, float], exchange_s: float) -> None:
        """All compute, wait for the slowest, and exchange."""
        slowest = max(compute_s.values())
        if self.now < self.window_s:
            for worker in self.workers:
                done = self.now + compute_s[worker]
                together = self.now + slowest
                self._note(worker, self.now, done, "compute")
                self._note(worker, done, together, "wait")
                self._note(worker, together, together + exchange_s, "send")
        self.computed_s += sum(compute_s.values())
        self.now += slowest + exchange_s

    @property
    def utilization(self) -> float:
        return self.computed_s / (len(self.workers) * self.now) if self.now else 0.0

    def _note(self, worker: NodeId, start: float, end: float, activity: Activity) -> None:
        if start < min(end, self.window_s):
            span = Span(start, min(end, self.window_s), activity)
            self.lanes.setdefault(worker, []).append(span)


class SynchronousRun:
    """Rounds of local steps whose mean change is one outer step.

    Data parallelism is a round of one step, taken by one replica on everybody's samples: the mean
    of the workers' gradients is the gradient of all their samples.
    """

    def __init__(self, world: World, settings: DiLoCo | DataParallel) -> None:
        self.world, self.settings = world, settings
        environment = world.experiment.environment
        topology = environment.tree()
        self.workers: tuple[WorkerPlace, ...] = topology.workers
        self.model = environment.model_of(topology, world.experiment.seed)
        self.ring = Ring.of(environment)
        self.steps = self._local_steps()
        self.outer = settings.outer if isinstance(settings, DiLoCo) else PLAIN
        self.together = isinstance(settings, DataParallel)
        self.tensors, self.trainers = self._replicas()
        self.clock = Clock([w.name for w in self.workers], world.experiment.window_s)
        self.rounds = self.issued = self.tokens = self.local_steps = 0

    def run(self) -> Outcome:
        laboratory = self.world.laboratory
        with ThreadPoolExecutor(max(1, self.world.experiment.threads)) as pool:
            while not self.world.stopped and not self.world.is_over(
                self.clock.now, self.local_steps
            ):
                try:
                    self._round(pool)
                except Interrupted:
                    break
                if laboratory is not None:
                    laboratory.measure_if_due(
                        self._theta(), self.clock.now, self.local_steps, self.tokens
                    )
                self.world.progress(self.clock.now, self.local_steps)
        return self._outcome()

    def _local_steps(self) -> dict[NodeId, int]:
        if isinstance(self.settings, DataParallel):
            return {worker.name: 1 for worker in self.workers}
        if self.settings.dynamic:
            return self.world.experiment.environment.tree().local_steps(self.settings.h)
        return {worker.name: self.settings.h for worker in self.workers}

    def _replicas(self) -> tuple[TensorState, list[Trainer]]:
        laboratory = self.world.laboratory
        replicas = 1 if self.together else len(self.workers)
        if laboratory is None:
            return NullState(), [untrained] * replicas
        trainers = [laboratory.trainer() for _ in range(replicas)]
        for trainer in trainers:
            trainer.stop = self.world.stop
        state = TorchState.start(laboratory.start, self.outer, has_parent=False)
        return state, [trainer.run for trainer in trainers]

    def _round(self, pool: ThreadPoolExecutor) -> None:
        jobs = self._jobs()
        done = list(pool.map(lambda train, job: train(job), self.trainers, jobs))
        changes = [d.payload for d in done if isinstance(d.payload, Fragments)]
        if changes:
            parts = zip(*(change.tensors for change in changes), strict=True)
            self.tensors.apply(Fragments([torch.stack(part).mean(0) for part in parts]))
        self.rounds += 1
        self.tokens += sum(d.tokens for d in done)
        self.local_steps += sum(self.steps.values())
        now = self.clock.now
        seconds = {name: self.model.compute_s(name, h, now) for name, h in self.steps.items()}
        self.clock.round(seconds, self.ring.seconds)

    def _jobs(self) -> list[RunLocalSteps]:
        """Consecutive samples for each; all are of the same progress, that of the round."""
        batch = self.world.experiment.batch_size
        progress = self.issued
        shares = (
            [(1, batch * len(self.workers))]
            if self.together
            else [(steps, batch) for steps in self.steps.values()]
        )
        jobs = []
        for index, (steps, size) in enumerate(shares):
            start, self.issued = self.issued, self.issued + steps * size
            lease = Lease(f"{self.rounds}/{index}", "text", 0, ((start, self.issued),), progress)
            jobs.append(RunLocalSteps(lease, steps, size, self.tensors.publish()))
        return jobs

    def _theta(self) -> Fragments:
        theta = self.tensors.publish()
        assert isinstance(theta, Fragments)
        return theta

    def _outcome(self) -> Outcome:
        return self.world.outcome(
            finished=self.world.is_over(self.clock.now, self.local_steps),
            elapsed_s=self.clock.now,
            local_steps=self.local_steps,
            tokens=self.tokens,
            model=self._theta() if self.world.laboratory is not None else None,
            utilization=self.clock.utilization,
            wide_area_bytes=self.rounds * self.ring.wide_area_bytes,
            delivered=1.0,
            mean_staleness=0.0,
            max_staleness=0,
            lanes={name: tuple(spans) for name, spans in self.clock.lanes.items()},
        )
