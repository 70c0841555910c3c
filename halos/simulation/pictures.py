"""A comparison in pictures: loss over time and over tokens, and what every worker did.

The only module that knows matplotlib, which is an extra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from halos.simulation.comparison import by_method
from halos.simulation.outcome import Activity, Outcome, Span
from halos.simulation.units import SECONDS, TOKENS, Unit, unit_for, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind tell apart, without their yellow, which is too
# pale for a line on white. Further methods take them again with another dash.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
ACTIVITIES: dict[Activity, tuple[str, str]] = {
    "compute": ("#0072B2", "computes"),
    "send": ("#E69F00", "sends or receives"),
    "wait": ("#E4E4E4", "waits"),
}
MAX_LANES = 96
BETWEEN_REGIONS = 0.6  # lanes
LOG_FROM = 10.0  # how far the methods' spans differ before time is on a logarithmic axis
SHOWN = 0.35  # of all that the loss comes down, at least
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E8E8E8",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Numbers = NDArray[np.float64]


def _figure(width: float, height: float) -> Figure:
    """A figure of so many inches, for a file rather than a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean, lowest and highest loss over seeds, at each of ``x``."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers

    @classmethod
    def of(cls, runs: Sequence[Outcome], x_of: Callable[[Any], float]) -> Curve:
        """Where all of ``runs`` have a loss, on straight lines between evaluations."""
        xs = [np.array([x_of(point) for point in run.points], dtype=np.float64) for run in runs]
        start, end = max(x[0] for x in xs), min(x[-1] for x in xs)
        everywhere = np.unique(np.concatenate(xs))
        x = everywhere[(everywhere >= start) & (everywhere <= end)]
        losses = np.array(
            [
                np.interp(x, own, [point.loss for point in run.points])
                for own, run in zip(xs, runs, strict=True)
            ]
        )
        return cls(x, losses.mean(0), losses.min(0), losses.max(0))


def draw_losses(outcomes: Sequence[Outcome], target: float, folder: Path) -> list[Path]:
    """``loss-over-time.png`` and ``loss-over-tokens.png``. Raises ``ImportError``, ``OSError``."""
    ends = [outcome.elapsed_s for outcome in outcomes]
    # On a logarithmic axis large numbers read more easily than those below 1.
    time = unit_for(min(ends) if apart(ends) else max(ends), SECONDS)
    tokens = unit_for(max(outcome.tokens for outcome in outcomes), TOKENS)
    amount = "tokens trained on" + (f" ({tokens.name})" if tokens.name else "")
    pictures = {
        "loss-over-time.png": (f"virtual time ({time.name})", lambda p: time.of(p.elapsed_s)),
        "loss-over-tokens.png": (amount, lambda p: tokens.of(p.tokens)),
    }
    for name, (label, x_of) in pictures.items():
        losses(outcomes, target, x_of, label).savefig(folder / name)
    return [folder / name for name in pictures]


def losses(
    outcomes: Sequence[Outcome], target: float, x_of: Callable[[Any], float], x_label: str
) -> Figure:
    """A line a method, over what ``x_of`` says of an evaluation."""
    from matplotlib import rc_context

    curves = {
        method: Curve.of(list(runs.values()), x_of) for method, runs in by_method(outcomes).items()
    }
    names = {method: wrapped(method) for method in curves}
    lines = sum(1 + name.count("\n") for name in names.values()) + 1
    with rc_context(STYLE):
        figure = _figure(9.5, max(5.0, 0.9 + 0.185 * lines))
        axes = figure.add_subplot()
        for index, (method, curve) in enumerate(curves.items()):
            colour = COLOURS[index % len(COLOURS)]
            dash = DASHES[index // len(COLOURS) % len(DASHES)]
            axes.plot(curve.x, curve.mean, label=names[method], color=colour, ls=dash, lw=1.7)
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
        axes.axhline(target, color="#555555", lw=0.9, ls=(0, (4, 3)), label=f"target {target:.3f}")
        _scale(axes, list(curves.values()))
        axes.set(xlabel=x_label, ylabel="validation loss (nats a token)")
        axes.set_title(f"{outcomes[0].environment}: {told_seeds(outcomes)}")
        figure.legend(loc="outside right upper")
    return figure


def _scale(axes: Axes, curves: Sequence[Curve]) -> None:
    """Show what tells the methods apart: not the first drop, and short runs beside long ones."""
    lowest = min(float(curve.low.min()) for curve in curves)
    highest = max(float(curve.high.max()) for curve in curves)
    worst = max(float(curve.mean[-1]) for curve in curves)
    height = min(highest - lowest, max(2.5 * (worst - lowest), SHOWN * (highest - lowest))) or 1.0
    axes.set_ylim(lowest - 0.04 * height, lowest + 1.04 * height)
    ends = [float(curve.x[-1]) for curve in curves]
    if not apart(ends):
        axes.set_xlim(0, max(ends) * 1.02)
        return
    seen = [curve.x[(curve.x > 0) & (curve.mean <= lowest + height)] for curve in curves]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlim(min(float(x[0]) for x in seen) * 0.9, max(ends) * 1.1)


def apart(ends: Sequence[float]) -> bool:
    """Whether these are too far from each other for one linear axis."""
    return max(ends) > LOG_FROM * min(ends) > 0


def draw_timeline(outcome: Outcome, path: Path) -> None:
    """Raises ``ImportError``, ``OSError``."""
    timeline(outcome).savefig(path)


def timeline(outcome: Outcome) -> Figure:
    """A lane a worker, of the run's beginning."""
    from matplotlib import rc_context

    lanes = list(outcome.lanes.items())[:MAX_LANES]
    end = max((span.end_s for _, spans in lanes for span in spans), default=0.0)
    unit = unit_for(end, SECONDS)
    regions = [list(own) for _, own in groupby(lanes, key=lambda lane: region(lane[0]))]
    at = {
        worker: index + BETWEEN_REGIONS * behind
        for index, (worker, behind) in enumerate(
            (worker, behind) for behind, own in enumerate(regions) for worker, _ in own
        )
    }
    bottom = max(at.values(), default=0.0) + 0.6
    with rc_context(STYLE):
        figure = _figure(9.5, 1.6 + 0.17 * bottom)
        axes = figure.add_subplot()
        for worker, spans in lanes:
            _lane(axes, at[worker], spans, unit)
        axes.set_yticks(list(at.values()), list(at), fontsize=7.5)
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(0, unit.of(end) or 1), ylim=(bottom, -0.6))
        axes.set_xlabel(f"virtual time ({unit.name})")
        axes.grid(visible=False, axis="y")
        of_all = f", the first {len(lanes)} workers" if len(outcome.lanes) > len(lanes) else ""
        axes.set_title(f"{wrapped(outcome.method, 80)}\non {outcome.environment}{of_all}")
        _legend(figure)
    return figure


def _lane(axes: Axes, row: float, spans: Sequence[Span], unit: Unit) -> None:
    for activity, (colour, _) in ACTIVITIES.items():
        own = [
            (unit.of(span.start_s), unit.of(span.end_s - span.start_s))
            for span in spans
            if span.activity == activity
        ]
        # With an outline, for what is narrower than a dot would be drawn here and left out there.
        outline = 0.6 if activity == "send" else 0.0
        axes.broken_barh(
            own, (row - 0.4, 0.8), facecolors=colour, edgecolors=colour, linewidth=outline
        )


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for colour, label in ACTIVITIES.values()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))


def region(worker: str) -> str:
    return worker.rpartition("/")[0]


def told_seeds(outcomes: Sequence[Outcome]) -> str:
    most = max(len(runs) for runs in by_method(outcomes).values())
    return "one seed" if most == 1 else f"mean of {most} seeds, and the range that they span"
