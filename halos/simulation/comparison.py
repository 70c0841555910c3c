"""Methods beside each other: what their outcomes come to, in the mean over seeds. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from halos.simulation.outcome import Outcome, Reached

REFERENCE = "paper"  # whose final loss is the target, unless told otherwise


@dataclass(frozen=True, slots=True)
class Mean:
    """Of one figure over seeds. ``deviation``: the sample's; ``None`` for a single value."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean | None:
        """``None`` if there are none."""
        given = [value for value in values if value is not None]
        if not given:
            return None
        return cls(statistics.mean(given), statistics.stdev(given) if len(given) > 1 else None)


@dataclass(frozen=True, slots=True)
class Row:
    """One method over its seeds.

    ``time_s`` (virtual) and ``tokens`` to the target are those of the ``reached`` seeds of all
    ``seeds`` that got there. ``relative_time`` is time to the target over that of the first method,
    in the mean over seeds that reached it with both. ``overtaken``: how many times sooner the first
    method was at the loss that this one ended with, seed by seed; ``None`` if it was not always.
    Other fields are as in ``Outcome``, in the mean; ``max_staleness`` is the greatest.
    """

    method: str
    seeds: int
    reached: int
    time_s: Mean | None
    tokens: Mean | None
    relative_time: Mean | None
    overtaken: Mean | None
    final_loss: Mean | None
    elapsed_s: float
    utilization: float
    wide_area_bytes: float
    delivered: float
    mean_staleness: float | None
    max_staleness: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """``rows`` in the order that the methods were asked for."""

    environment: str
    target_loss: float
    rows: tuple[Row, ...]


BySeed = Mapping[int, Outcome]


def compare(
    outcomes: Sequence[Outcome], target_loss: float | None = None, *, first: str | None = None
) -> Comparison:
    """Of outcomes with evaluations, at least one, all in one environment.

    Without ``target_loss`` it is where the evaluations of the method ``paper`` ended in the mean,
    or those of the worst if that is not among them. ``first``: the method that the others are set
    beside, by default the first outcome's; nothing is if none of its outcomes is there.
    """
    methods = by_method(outcomes)
    target = default_target(methods) if target_loss is None else target_loss
    beside = methods.get(first or outcomes[0].method, {})
    rows = tuple(_row(method, runs, beside, target) for method, runs in methods.items())
    return Comparison(outcomes[0].environment, target, rows)


def by_method(outcomes: Iterable[Outcome]) -> dict[str, dict[int, Outcome]]:
    """In the order in which they first appear."""
    methods: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        methods.setdefault(outcome.method, {})[outcome.seed] = outcome
    return methods


def default_target(methods: Mapping[str, BySeed]) -> float:
    ends = {
        name: statistics.mean(last_loss(outcome) for outcome in runs.values())
        for name, runs in methods.items()
    }
    return ends[REFERENCE] if REFERENCE in ends else max(ends.values())


def last_loss(outcome: Outcome) -> float:
    """Of the last evaluation: measured as all along the curve, unlike ``final_loss``."""
    return outcome.points[-1].loss


def _row(method: str, runs: BySeed, first: BySeed, target: float) -> Row:
    reached = {seed: outcome.reached(target) for seed, outcome in runs.items()}
    there = [at for at in reached.values() if at is not None]
    outcomes = list(runs.values())
    stalest = [o.max_staleness for o in outcomes if o.max_staleness is not None]
    return Row(
        method=method,
        seeds=len(runs),
        reached=len(there),
        time_s=Mean.of(at.elapsed_s for at in there),
        tokens=Mean.of(at.tokens for at in there),
        relative_time=Mean.of(_relative(seed, at, first, target) for seed, at in reached.items()),
        overtaken=_overtaken(runs, first),
        final_loss=Mean.of(outcome.final_loss for outcome in outcomes),
        elapsed_s=statistics.mean(outcome.elapsed_s for outcome in outcomes),
        utilization=statistics.mean(outcome.utilization for outcome in outcomes),
        wide_area_bytes=statistics.mean(outcome.wide_area_bytes for outcome in outcomes),
        delivered=statistics.mean(outcome.delivered for outcome in outcomes),
        mean_staleness=_mean(outcome.mean_staleness for outcome in outcomes),
        max_staleness=max(stalest, default=None),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    mean = Mean.of(values)
    return None if mean is None else mean.mean


def _relative(seed: int, at: Reached | None, first: BySeed, target: float) -> float | None:
    other = first[seed].reached(target) if seed in first else None
    if at is None or other is None or other.elapsed_s == 0:
        return None
    return at.elapsed_s / other.elapsed_s


def _overtaken(runs: BySeed, first: BySeed) -> Mean | None:
    sooner = []
    for seed, outcome in runs.items():
        if seed not in first:
            continue  # not computed yet
        loss = last_loss(outcome)
        here, there = outcome.reached(loss), first[seed].reached(loss)
        if here is None or there is None or there.elapsed_s == 0:
            return None
        sooner.append(here.elapsed_s / there.elapsed_s)
    return Mean.of(sooner)
