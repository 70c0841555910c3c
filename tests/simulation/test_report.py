"""A comparison: its figures worked out by hand, its files, and that its pictures are legible."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from halos.runtime.status import Point
from halos.simulation import pictures, units
from halos.simulation.campaign import Job, kept, stem
from halos.simulation.comparison import Mean, compare
from halos.simulation.environment import Environment
from halos.simulation.experiment import Experiment
from halos.simulation.methods import method_of
from halos.simulation.outcome import Outcome, Span
from halos.simulation.report import draw, write_tables

LONG = "halos:k=4:alpha=0.5:in_flight=carry:up=int4:down=int8"


def outcome(method: str, seed: int, *losses: float, step_s: float = 10.0) -> Outcome:
    """Evaluations every ``step_s``, every 1,000 tokens."""
    points = tuple(Point(i * step_s, i, i * 1000, loss) for i, loss in enumerate(losses))
    return Outcome(
        environment="somewhere",
        method=method,
        seed=seed,
        finished=True,
        elapsed_s=points[-1].elapsed_s,
        local_steps=len(losses),
        tokens=points[-1].tokens,
        final_loss=losses[-1] + 0.5,
        utilization=0.5 + 0.25 * seed,
        wide_area_bytes=100 + 100 * seed,
        delivered=1.0,
        mean_staleness=2.0 + seed,
        max_staleness=5 + seed,
        points=points,
        lanes={
            f"{region}/{i}": (Span(0, 4, "compute"), Span(4, 6, "send"), Span(6, 8, "wait"))
            for region in ("us", "eu")
            for i in range(2)
        },
    )


FAST = [outcome("fast", 0, 5, 3, 1, step_s=5), outcome("fast", 1, 5, 2, 1, step_s=5)]
PAPER = [outcome("paper", 0, 5, 4, 2), outcome("paper", 1, 5, 4, 3)]


def test_the_target_is_where_paper_ends_or_else_the_worst() -> None:
    assert compare([*FAST, *PAPER]).target_loss == 2.5
    others = [replace(one, method="other") for one in PAPER]
    assert compare([*FAST, *others]).target_loss == 2.5
    assert compare([*PAPER, outcome("worse", 0, 5, 4)]).target_loss == 2.5
    assert compare([*FAST, *PAPER], 1.5).target_loss == 1.5


def test_time_and_tokens_to_the_target_over_the_seeds_that_reach_it() -> None:
    fast, paper = compare([*FAST, *PAPER]).rows
    # fast: 3 at 5 s and 1 at 10 s: 2.5 after 6.25 s; with seed 1 from 5 at 0 s to 2 at 5 s.
    times = [6.25, 5 * 2.5 / 3]
    assert fast.time_s == Mean(pytest.approx(np.mean(times)), pytest.approx(np.std(times, ddof=1)))
    assert fast.tokens is not None
    assert fast.tokens.mean == pytest.approx(np.mean(times) / 5 * 1000)
    assert (fast.reached, fast.seeds) == (2, 2)
    # paper reaches it only with seed 0: 4 at 10 s, 2 at 20 s.
    assert (paper.reached, paper.seeds) == (1, 2)
    assert paper.time_s == Mean(17.5, None)
    assert paper.relative_time == Mean(17.5 / 6.25, None)


def test_how_much_sooner_the_first_was_is_counted_seed_by_seed() -> None:
    fast, paper = compare([*FAST, *PAPER]).rows
    # Where paper ended with 2 after 20 s, fast was at 7.5 s; with 3 after 20 s at 10 / 3 s.
    assert paper.overtaken is not None
    assert paper.overtaken.mean == pytest.approx((20 / 7.5 + 20 / (10 / 3)) / 2)
    assert fast.overtaken == Mean(1, 0)
    slow, quick = compare([*PAPER, *FAST]).rows
    assert quick.overtaken is None  # paper never got there
    assert slow.overtaken == Mean(1, 0)


def test_what_is_not_reached_has_no_time() -> None:
    row = compare(PAPER, 0.1).rows[0]
    assert (row.reached, row.time_s, row.tokens, row.relative_time) == (0, None, None, None)


def test_other_figures_are_means_and_the_greatest_staleness() -> None:
    row = compare(PAPER).rows[0]
    assert row.final_loss == Mean(3.0, pytest.approx(0.5**0.5))  # 2 + 0.5 and 3 + 0.5
    assert (row.utilization, row.wide_area_bytes, row.mean_staleness) == (0.625, 150, 2.5)
    assert row.max_staleness == 6


def test_without_the_first_method_nothing_is_set_beside_it() -> None:
    (row,) = compare(PAPER, first="fast").rows
    assert (row.relative_time, row.overtaken) == (None, None)
    assert row.reached == 1


def test_files_hold_what_the_rows_say(tmp_path: Path) -> None:
    compared = compare([*FAST, *PAPER])
    write_tables(compared, tmp_path, {"partial": False})
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["target_loss"], told["partial"]) == (2.5, False)
    assert told["rows"][1]["time_s"] == {"mean": 17.5, "deviation": None}
    with (tmp_path / "report.csv").open() as file:
        fast, paper = csv.DictReader(file)
    assert (fast["method"], paper["method"]) == ("fast", "paper")
    assert (paper["time_s_mean"], paper["time_s_deviation"]) == ("17.5", "")
    assert float(fast["time_s_mean"]) == compared.rows[0].time_s.mean
    assert paper["reached"] == "1"


def test_a_picture_of_each_kind_and_a_timeline_a_method(tmp_path: Path) -> None:
    outcomes = [*FAST, *PAPER, outcome(LONG, 0, 5, 4, 3)]
    draw(compare(outcomes), outcomes, tmp_path)
    drawn = {path.name: imread(path) for path in tmp_path.iterdir()}
    assert set(drawn) == {
        "loss-over-time.png",
        "loss-over-tokens.png",
        "timeline-fast.png",
        "timeline-paper.png",
        "timeline-halos-k=4-alpha=0.5-in_flight=carry-up=int4-down=int8.png",
    }
    assert all(picture.std() > 0.01 for picture in drawn.values())  # not blank


def test_a_curve_is_the_mean_with_the_range_of_the_seeds_where_all_are_known() -> None:
    runs = [outcome("m", 0, 5, 3, 1), outcome("m", 1, 4, 2)]
    curve = pictures.Curve.of(runs, lambda point: point.elapsed_s)
    assert curve.x.tolist() == [0, 10]
    assert curve.mean.tolist() == [4.5, 2.5]
    assert (curve.low.tolist(), curve.high.tolist()) == ([4, 2], [5, 3])


@pytest.mark.parametrize(("span", "scale"), [(9.0, "linear"), (30.0, "log")])
def test_time_is_logarithmic_where_spans_differ_tenfold(span: float, scale: str) -> None:
    outcomes = [outcome("short", 0, 5, 3, 2), outcome("long", 0, 5, 3, 2, step_s=10 * span)]
    figure = pictures.losses(outcomes, 2.0, lambda point: point.elapsed_s, "s")
    assert figure.axes[0].get_xscale() == scale


def boxes(figure: Figure, texts: list[Text]) -> list[Bbox]:
    return [text.get_window_extent() for text in texts]


def test_seventeen_methods_with_long_names_are_told_apart_and_nothing_overlaps() -> None:
    outcomes = [outcome(f"{LONG}:h={i}", 0, 5, 4 - i / 10, 3 - i / 10) for i in range(1, 18)]
    figure = pictures.losses(outcomes, 2.0, lambda point: point.elapsed_s, "s")
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    looks = {(line.get_color(), repr(line._dash_pattern)) for line in axes.lines[:17]}
    assert len(looks) == 17
    texts = boxes(figure, legend.get_texts())
    assert len(texts) == 18  # and the target
    assert not any(Bbox.intersection(a, b) for a, b in combinations(texts, 2))
    frame = legend.get_window_extent()
    assert frame.x0 >= axes.get_tightbbox().x1
    assert frame.y0 >= 0 and frame.x1 <= figure.bbox.x1
    assert axes.get_window_extent().width > 0.4 * figure.bbox.width


def test_eighty_lanes_are_labelled_and_nothing_overlaps() -> None:
    spans = (Span(0, 4, "compute"), Span(4, 6, "send"), Span(6, 8, "wait"))
    lanes = {f"region-{r}/{i}": spans for r in range(10) for i in range(8)}
    figure = pictures.timeline(replace(outcome(LONG, 0, 5, 4), lanes=lanes))
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    labels = axes.get_yticklabels()
    assert [label.get_text() for label in labels] == list(lanes)
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes(figure, labels)))
    assert legend.get_window_extent().y0 >= axes.title.get_window_extent().y1
    gaps = [b - a for a, b in pairwise(axes.get_yticks())]
    assert [round(gap, 3) for gap in gaps[6:9]] == [1, 1.6, 1]  # a region has eight


def test_thousands_of_workers_are_not_all_drawn() -> None:
    lanes = {f"r/{i}": (Span(0, 8, "compute"),) for i in range(2000)}
    figure = pictures.timeline(replace(outcome("m", 0, 5, 4), lanes=lanes))
    assert len(figure.axes[0].get_yticks()) == pictures.MAX_LANES
    assert "the first 96 workers" in figure.axes[0].get_title(loc="left")


def test_names_become_files_and_lines() -> None:
    assert stem(LONG) == "halos-k=4-alpha=0.5-in_flight=carry-up=int4-down=int8"
    long = ":".join(["halos", *(f"local_momentum=0.{i}" for i in range(20))])
    assert len(stem(long)) < 120
    assert stem(long) != stem(long + "1")
    lines = units.wrapped(LONG).split("\n")
    assert "".join(line.strip() for line in lines) == LONG
    assert max(map(len, lines)) <= units.NAME_WIDTH + 2


@pytest.mark.parametrize(
    ("amount", "unit", "said"),
    [
        (107.4, units.SECONDS, "107 s"),
        (13_550, units.SECONDS, "3.76 h"),
        (720, units.SECONDS, "12.0 min"),
        (0, units.SECONDS, "0 s"),
        (12_700_000_000, units.BYTES, "12.7 GB"),
        (999, units.TOKENS, "999"),
    ],
)
def test_amounts_are_written_in_a_unit_that_fits(
    amount: float, unit: tuple[units.Unit, ...], said: str
) -> None:
    assert units.shown(amount, unit) == said


def job(folder: Path, method: str = "fast", **given: object) -> Job:
    environment = Environment.load("paper-4x4")
    given = {"environment": environment, "seed": 0, "local_steps": 64, **given}
    return Job(Experiment(method=method_of(method), **given), folder, "data")


def test_what_is_kept_is_taken_up_only_while_all_that_matters_is_the_same(tmp_path: Path) -> None:
    asked = job(tmp_path)
    assert kept(asked) is None
    one = outcome("fast", 0, 5, 4)
    asked.path().write_text(json.dumps(one.to_json()))
    assert kept(job(tmp_path)) == one
    other = Environment.load("paper-4x4").model_copy(update={"step_ms": 1.0})
    changed = [
        job(tmp_path, seed=1),
        job(tmp_path, local_steps=65),
        job(tmp_path, "fast:k=5"),
        job(tmp_path, environment=other),
        replace(asked, data="other data"),
    ]
    assert [kept(one) for one in changed] == [None] * 5
    assert len({one.path() for one in changed}) == 5


def test_a_changed_program_computes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = job(tmp_path).path()
    monkeypatch.setattr("halos.simulation.campaign.sources", lambda: "another")
    assert job(tmp_path).path() != before


def test_an_outcome_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    asked = job(tmp_path)
    asked.path().write_text("{}")
    with pytest.raises(ValueError, match=f"{asked.path()}: is no whole outcome; remove it"):
        kept(asked)
