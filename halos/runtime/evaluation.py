"""Validation beside training: a thread of its own that takes the newest model when it is free."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from halos.core.fragments import Fragments, ModelLayout
from halos.training.data import Dataset
from halos.training.evaluate import validation_loss
from halos.training.model import LanguageModel
from halos.training.parameters import scatter

log = logging.getLogger(__name__)

BATCH = 32  # sequences


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of the root's model. ``loss`` in nats a token."""

    elapsed_s: float
    local_steps: int
    tokens: int
    loss: float


class Evaluator:
    """Evaluates the root's model; results also go to a file of one JSON line each."""

    def __init__(
        self, model: LanguageModel, layout: ModelLayout, dataset: Dataset, batches: int, file: Path
    ) -> None:
        self._model = model
        self._layout = layout
        self._dataset = dataset
        self._batches = batches
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._running: Future[Point] | None = None
        self.points: list[Point] = read_points(file)

    def collect(self) -> bool:
        """Take a finished result in. Whether the evaluator is free."""
        if self._running is not None and self._running.done():
            point = self._running.result()
            self._running = None
            self.points.append(point)
            try:
                with self._file.open("a") as file:
                    file.write(json.dumps(asdict(point)) + "\n")
            except OSError as error:  # a full disk is no reason to stop training
                log.warning("%s: this evaluation is not kept (%s)", self._file, error.strerror)
        return self._running is None

    def forget_after(self, local_steps: int) -> None:
        """Drop what was found of a run that did not go on from here."""
        kept = [point for point in self.points if point.local_steps <= local_steps]
        if len(kept) < len(self.points):
            self.points = kept
            self._file.write_text("".join(json.dumps(asdict(p)) + "\n" for p in kept))

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


def read_points(file: Path) -> list[Point]:
    """What evaluations of this run found so far; a line that a crash cut short is left out."""
    points = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            points.append(Point(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return points
