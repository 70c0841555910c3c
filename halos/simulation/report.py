"""A comparison as files: JSON and CSV, and pictures where matplotlib is installed."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from halos.simulation.campaign import stem
from halos.simulation.comparison import Comparison, Mean, Row, by_method
from halos.simulation.outcome import Outcome


def write_tables(comparison: Comparison, folder: Path, facts: dict[str, Any]) -> list[Path]:
    """``report.json``, with ``facts`` beside the rows, and ``report.csv``. Raises ``OSError``."""
    told, table = folder / "report.json", folder / "report.csv"
    told.write_text(json.dumps({**facts, **asdict(comparison)}, indent=1) + "\n", encoding="utf-8")
    rows = [flat(row) for row in comparison.rows]
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [told, table]


def flat(row: Row) -> dict[str, Any]:
    """A column for each number; the same for every row, whatever it lacks."""
    cells: dict[str, Any] = {}
    for field in fields(row):
        value = getattr(row, field.name)
        if field.type == "Mean | None":
            for part in fields(Mean):
                cells[f"{field.name}_{part.name}"] = (
                    None if value is None else getattr(value, part.name)
                )
        else:
            cells[field.name] = value
    return cells


def draw(comparison: Comparison, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """All pictures; of each method's first seed one of what its workers did.

    Raises ``ImportError`` without matplotlib, and ``OSError``.
    """
    from halos.simulation.pictures import draw_losses, draw_timeline

    drawn = draw_losses(outcomes, comparison.target_loss, folder)
    for method, runs in by_method(outcomes).items():
        path = folder / f"timeline-{stem(method)}.png"
        draw_timeline(next(iter(runs.values())), path)
        drawn.append(path)
    return drawn
