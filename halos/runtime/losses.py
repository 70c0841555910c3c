"""The validation losses of a run, as points in memory and as lines of a file in its directory."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from halos.runtime.status import Point

log = logging.getLogger(__name__)

LOSSES = "loss.jsonl"


class Losses:
    """Those found so far, oldest first, in ``points``."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / LOSSES
        self.points: list[Point] = read_points(self.file)

    def keep(self, point: Point) -> None:
        self.points.append(point)
        try:
            with self.file.open("a") as file:
                file.write(json.dumps(asdict(point)) + "\n")
        except OSError as error:  # a full disk is no reason to stop training
            log.warning("%s: this evaluation is not kept (%s)", self.file, error.strerror)

    def forget_after(self, local_steps: int) -> None:
        """Drop what was found of a run that did not go on from here."""
        kept = [point for point in self.points if point.local_steps <= local_steps]
        if len(kept) < len(self.points):
            self.points = kept
            self.file.write_text("".join(json.dumps(asdict(p)) + "\n" for p in kept))


def read_points(file: Path) -> list[Point]:
    """What evaluations of a run found so far; a line that a crash cut short is left out."""
    points = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            points.append(Point(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return points
