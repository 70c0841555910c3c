"""What all methods share: the model, the data and their order, the inner loop, the measuring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from halos.core.fragments import Fragments
from halos.runtime.prepare import Prepared, prepare
from halos.runtime.status import Point
from halos.simulation.environment import Environment
from halos.specification import RunSpecification
from halos.training.corpus import Progress
from halos.training.evaluate import validation_loss
from halos.training.inner import LocalTrainer
from halos.training.model import build_model
from halos.training.parameters import scatter

BATCH = 32  # sequences
POINTS = 48  # evaluations over a whole run
FINAL_SAMPLES = 64 * BATCH


def specification_of(
    environment: Environment,
    base: RunSpecification | None,
    *,
    seed: int,
    local_steps: int | None = None,
) -> RunSpecification:
    """``base`` as a run in ``environment``; without it, the built-in model on the built-in text."""
    named = {"run": {"name": "simulated"}}
    given: dict[str, Any] = base.model_dump(by_alias=True) if base is not None else named
    given["run"] = {**given["run"], "seed": seed}
    given["root"] = {"workers": ()}
    given["regions"] = [
        {"name": region.name, "workers": region.workers} for region in environment.regions
    ]
    if local_steps is not None:
        training = {**given.get("training", {}), "local_steps_total": local_steps, "epochs": None}
        given["training"] = training
    return RunSpecification.model_validate(given)


@dataclass
class Laboratory:
    """One run's replicas and its evaluations. ``at_steps``: when the next evaluation is due."""

    prepared: Prepared
    evaluated: nn.Module  # takes the parameters that are measured
    points: list[Point] = field(default_factory=list)
    at_steps: float = 0.0

    @classmethod
    def of(cls, specification: RunSpecification, progress: Progress | None = None) -> Laboratory:
        """Raises ``UserError``; ``progress`` hears of long work."""
        prepared = prepare(specification, progress)
        return cls(prepared, build_model(prepared.model, 0))

    @property
    def start(self) -> Fragments:
        """Parameters at the start of the run."""
        return self.prepared.start

    def trainer(self) -> LocalTrainer:
        return self.prepared.trainer()

    def measure_if_due(self, model: Fragments, now: float, local_steps: int, tokens: int) -> None:
        """A few dozen times over the run, at about equal distances in local steps."""
        if local_steps < self.at_steps:
            return
        total = self.prepared.total_samples / self.prepared.specification.training.batch_size
        self.at_steps = local_steps + total / POINTS
        self.measure(model, now, local_steps, tokens)

    def measure(self, model: Fragments, now: float, local_steps: int, tokens: int) -> None:
        batches = self.prepared.specification.evaluation.batches
        self.points.append(Point(now, local_steps, tokens, self.loss(model, batches * BATCH)))

    def loss(self, model: Fragments, samples: int = FINAL_SAMPLES) -> float:
        """Validation loss in nats a token over the first so many held-out samples."""
        scatter(self.evaluated, self.prepared.layout, model)
        return validation_loss(self.evaluated, self.prepared.dataset, BATCH, samples)
