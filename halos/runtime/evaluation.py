"""Validation beside training: a thread of its own that takes the newest model when it is free."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch import nn

from halos.core.fragments import Fragments, ModelLayout
from halos.runtime.losses import Losses
from halos.runtime.status import Point
from halos.training.data import Dataset
from halos.training.evaluate import validation_loss
from halos.training.parameters import scatter

BATCH = 32  # sequences


class Evaluator:
    """Evaluates the root's model into ``losses``."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        dataset: Dataset,
        batches: int,
        losses: Losses,
    ) -> None:
        self._model = model
        self._layout = layout
        self._dataset = dataset
        self._batches = batches
        self._losses = losses
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._running: Future[Point] | None = None

    def collect(self) -> bool:
        """Take a finished result in. Whether the evaluator is free."""
        if self._running is not None and self._running.done():
            self._losses.keep(self._running.result())
            self._running = None
        return self._running is None

    @property
    def points(self) -> list[Point]:
        return self._losses.points

    def submit(self, model: Fragments, elapsed_s: float, local_steps: int, tokens: int) -> None:
        """Begin to evaluate ``model``; the evaluator must be free."""
        assert self._running is None
        self._running = self._thread.submit(self._evaluate, model, elapsed_s, local_steps, tokens)

    def whole(self, model: Fragments) -> float:
        """Loss over the whole validation set, now."""
        self.finish()
        scatter(self._model, self._layout, model)
        return validation_loss(self._model, self._dataset, BATCH)

    def finish(self) -> None:
        """Wait for what runs, and take it in."""
        if self._running is not None:
            self._running.exception()
            self.collect()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _evaluate(self, model: Fragments, elapsed_s: float, local_steps: int, tokens: int) -> Point:
        scatter(self._model, self._layout, model)
        loss = validation_loss(self._model, self._dataset, BATCH, self._batches * BATCH)
        return Point(elapsed_s, local_steps, tokens, loss)
