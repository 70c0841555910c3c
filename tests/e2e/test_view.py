"""What a person sees of a run."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from coordinator.view import RunView, clock, curve, line
from halos.runtime.status import Point, RegionStatus, RunStatus

STATUS = RunStatus(
    name="demo",
    elapsed_s=75.0,
    local_steps=1_234,
    tokens=631_808,
    issued=10_100,
    credited=9_872,
    delivered=9_800,
    total=49_152,
    tokens_per_s=31_000.0,
    computing_share=0.97,
    root_version=40,
    regions=(
        RegionStatus("us", 2, 91, 25, True, 249_408, 2.709, 1.0, 0),
        RegionStatus("eu", 2, 0, 0, False, 0, None, None, 2),
    ),
    refusals={"non_finite": 3},
)
POINTS = [Point(float(i), i * 100, i * 51_200, 5.0 - i * 0.3) for i in range(8)]


def shown(width: int) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=40, color_system=None)
    with RunView(console) as view:
        view.show(STATUS, POINTS)
    return file.getvalue()


def test_the_live_table_tells_what_each_region_does() -> None:
    text = shown(110)
    for part in ("us", "249,408", "2.709", "pushing", "2 waiting for samples", "20%", "1:15"):
        assert part in text
    assert "credited 9,872 of 49,152 samples · delivered 9,800" in text
    assert "3 refused (non_finite)" in text
    assert "workers computing 97% of the time" in text


def test_a_narrow_terminal_keeps_the_regions() -> None:
    text = shown(70)
    assert "us" in text
    assert "eu" in text


def test_the_curve_falls_from_its_highest_to_its_lowest_loss() -> None:
    rows = [str(row) for row in curve(POINTS)]
    assert "5.000" in rows[2]
    assert "2.900" in rows[-2]
    assert "700 steps" in rows[-1]
    assert curve(POINTS[:1]) == []


def test_a_line_is_enough_where_there_is_no_terminal() -> None:
    text = line(STATUS, POINTS, rate=31_000.0)
    assert "1:15   20%  local steps 1,234  31,000 tokens/s  validation loss 2.900" in text
    assert "validation" not in line(replace(STATUS, credited=0), [], rate=0.0)


def test_times_are_written_as_people_do() -> None:
    assert [clock(s) for s in (0, 61, 3_600, 7_384.6)] == ["0:00", "1:01", "1:00:00", "2:03:05"]
