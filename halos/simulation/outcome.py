"""What one simulated run came to, as plain data. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from halos.runtime.status import Point

Activity = Literal["compute", "send", "wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """What a worker did from ``start_s`` to ``end_s``, in virtual seconds."""

    start_s: float
    end_s: float
    activity: Activity


@dataclass(frozen=True)
class Outcome:
    """One method on one environment with one seed. Times in virtual seconds.

    ``points`` and ``final_loss`` are empty when only time was modelled. ``utilization`` is the
    share of all workers' time that they computed, ``delivered`` the share of the credited samples
    whose change reached the model that is the result. Staleness is that of what was applied to that
    model, in its versions. ``lanes`` holds what each worker did at the beginning of the run.
    """

    environment: str
    method: str
    seed: int
    finished: bool
    elapsed_s: float
    local_steps: int
    tokens: int
    final_loss: float | None
    utilization: float
    wide_area_bytes: int
    delivered: float
    mean_staleness: float | None
    max_staleness: int | None
    points: tuple[Point, ...] = ()
    lanes: dict[str, tuple[Span, ...]] = field(default_factory=dict)

    def reached(self, loss: float) -> Reached | None:
        return reached(self.points, loss)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Outcome:
        points = tuple(Point(**point) for point in given["points"])
        lanes = {
            worker: tuple(Span(**span) for span in spans)
            for worker, spans in given["lanes"].items()
        }
        return cls(**{**given, "points": points, "lanes": lanes})

    @classmethod
    def load(cls, path: Path) -> Outcome:
        return cls.from_json(json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class Reached:
    """When a loss was reached: virtual seconds, and tokens trained on by all workers together."""

    elapsed_s: float
    tokens: float


def reached(points: Sequence[Point], loss: float) -> Reached | None:
    """When the loss first came down to ``loss``, on straight lines between evaluations."""
    if points and points[0].loss <= loss:
        return Reached(points[0].elapsed_s, points[0].tokens)
    for before, after in pairwise(points):
        if after.loss <= loss < before.loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return Reached(
                before.elapsed_s + share * (after.elapsed_s - before.elapsed_s),
                before.tokens + share * (after.tokens - before.tokens),
            )
    return None
