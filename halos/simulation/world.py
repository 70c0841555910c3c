"""What a simulated run is given, and what it tells on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from halos.core.fragments import Fragments
from halos.simulation.environment import Environment
from halos.simulation.laboratory import Laboratory
from halos.simulation.methods import Method
from halos.simulation.outcome import Outcome, Span
from halos.specification import RunSpecification

BATCH_SIZE = 8  # samples a local step, where only time is modelled


@dataclass(frozen=True)
class Experiment:
    """One method in one environment with one seed.

    With a ``specification`` (see ``laboratory.specification_of``) gradients are computed; without
    it only time passes. The run ends with the root update that brings the reported local steps to
    ``local_steps``, or after ``hours`` of virtual time, whichever comes first. ``threads`` compute
    side by side, without any influence on the result. ``window_s``: how much of the beginning the
    outcome's lanes show.
    """

    environment: Environment
    method: Method
    seed: int = 0
    specification: RunSpecification | None = None
    local_steps: int | None = None
    hours: float | None = None
    threads: int = 1
    window_s: float = 60.0

    @property
    def until_s(self) -> float | None:
        return None if self.hours is None else self.hours * 3600

    @property
    def batch_size(self) -> int:
        """Samples a local step of one worker."""
        return self.specification.training.batch_size if self.specification else BATCH_SIZE


@dataclass
class World:
    """An experiment under way. ``laboratory`` is there when gradients are computed."""

    experiment: Experiment
    laboratory: Laboratory | None
    told: Callable[[float], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def stopped(self) -> bool:
        return self.stop.is_set()

    def progress(self, now: float, local_steps: int) -> None:
        """Tell the share that is done."""
        if self.told is None:
            return
        of_steps, of_time = self.experiment.local_steps, self.experiment.until_s
        shares = [local_steps / of_steps if of_steps else 0.0, now / of_time if of_time else 0.0]
        self.told(min(1.0, max(shares)))

    def is_over(self, now: float, local_steps: int) -> bool:
        """For methods that advance in rounds of their own."""
        of_steps, of_time = self.experiment.local_steps, self.experiment.until_s
        return (of_steps is not None and local_steps >= of_steps) or (
            of_time is not None and now >= of_time
        )

    def outcome(
        self,
        *,
        finished: bool,
        elapsed_s: float,
        local_steps: int,
        tokens: int,
        model: Fragments | None,
        lanes: Mapping[str, tuple[Span, ...]],
        **measured: Any,
    ) -> Outcome:
        """With the last evaluation of ``model``, if there is one."""
        experiment, laboratory = self.experiment, self.laboratory
        final_loss = None
        if laboratory is not None and model is not None:
            laboratory.measure(model, elapsed_s, local_steps, tokens)
            final_loss = laboratory.loss(model)
        return Outcome(
            environment=experiment.environment.name,
            method=experiment.method.name,
            seed=experiment.seed,
            finished=finished,
            elapsed_s=elapsed_s,
            local_steps=local_steps,
            tokens=tokens,
            final_loss=final_loss,
            points=tuple(laboratory.points) if laboratory is not None else (),
            lanes=dict(lanes),
            **measured,
        )
