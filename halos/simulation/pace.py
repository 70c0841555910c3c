"""How long a worker's round takes whose speed changes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from halos.core.messages import NodeId
from halos.simulation.chance import normal
from halos.simulation.circumstances import Variation


@dataclass(frozen=True, slots=True)
class Pace:
    """One worker's changes of speed. ``factors[i]`` holds until ``times_s[i]``, the last for ever.

    A round's chance depends on (seed, worker, when it starts) alone.
    """

    worker: NodeId
    seed: int
    times_s: Sequence[float]
    factors: Sequence[float]
    sigma: float

    @classmethod
    def of(cls, worker: NodeId, variations: Sequence[Variation], seed: int) -> Pace:
        """All ``variations`` together: factors multiply, spreads add as independent ones do."""
        times = sorted({at_s for v in variations for at_s, _ in v.schedule})
        factors = [
            math.prod(_factor_at(at_s, variation) for variation in variations)
            for at_s in (-math.inf, *times)
        ]
        sigma = math.hypot(*(variation.sigma for variation in variations))
        return cls(worker, seed, times, factors, sigma)

    def seconds(self, work_s: float, now: float) -> float:
        """How long a round that starts ``now`` takes, if it took ``work_s`` at constant speed."""
        if self.sigma:
            work_s /= math.exp(self.sigma * normal(self.seed, self.worker, now))
        piece, at = bisect_right(self.times_s, now), now
        while piece < len(self.times_s):
            done_s = (self.times_s[piece] - at) * self.factors[piece]
            if work_s <= done_s:
                break
            work_s -= done_s
            at = self.times_s[piece]
            piece += 1
        return at - now + work_s / self.factors[piece]


def _factor_at(at_s: float, variation: Variation) -> float:
    passed = [factor for start_s, factor in variation.schedule if start_s <= at_s]
    return passed[-1] if passed else 1.0
