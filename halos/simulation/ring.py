"""What an all-reduce over a ring of all workers costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from halos.simulation.environment import Environment

EXACT = 12  # regions up to which the best ring is found, rather than a good one


@dataclass(frozen=True)
class Ring:
    """Every worker sends ``2 (n - 1) / n`` models to the next, all at once.

    ``crossings``: links between regions that the ring takes.
    """

    workers: int
    model_bytes: int
    slowest_gbps: float | None  # None: takes no time
    crossings: int
    latency_s: float  # of the links taken, the longest

    @classmethod
    def of(cls, environment: Environment) -> Ring:
        """The ring whose slowest link is the fastest, each region visited once."""
        used = [i for i, region in enumerate(environment.regions) if region.workers]
        workers = sum(len(region.workers) for region in environment.regions)
        rates = environment.bandwidth_gbps
        order = used if rates is None else best_order(used, rates)
        steps = list(pairwise([*order, order[0]])) if len(order) > 1 else []
        slowest = None
        if rates is not None:
            inside = [rates[i][i] for i in used if len(environment.regions[i].workers) > 1]
            slowest = min([rates[a][b] for a, b in steps] + inside, default=None)
        latency = max((environment.latency_s(a, b) for a, b in steps), default=0.0)
        return cls(workers, environment.model_bytes, slowest, len(steps), latency)

    @property
    def sent_bytes(self) -> float:
        """By each worker."""
        return 2 * (self.workers - 1) / self.workers * self.model_bytes

    @property
    def seconds(self) -> float:
        hops = 2 * (self.workers - 1) * self.latency_s
        return hops + (self.sent_bytes * 8 / (self.slowest_gbps * 1e9) if self.slowest_gbps else 0)

    @property
    def wide_area_bytes(self) -> int:
        return round(self.crossings * self.sent_bytes)


def best_order(used: list[int], rates: tuple[tuple[float, ...], ...]) -> list[int]:
    """In which order to visit the regions and return, for the slowest link to be the fastest.

    Exact for up to :data:`EXACT` regions; beyond that each goes on to the fastest neighbour left.
    """
    if len(used) <= 2:
        return used
    if len(used) > EXACT:
        return _nearest(used, rates)
    first, others = used[0], used[1:]
    # Of all paths from ``first`` over a set of regions to its last: the best slowest link, and how.
    best = {(1 << i, i): (rates[first][region], [region]) for i, region in enumerate(others)}
    for _ in others[1:]:
        longer: dict[tuple[int, int], tuple[float, list[int]]] = {}
        for (visited, last), (slowest, path) in best.items():
            for i, region in enumerate(others):
                if visited >> i & 1:
                    continue
                candidate = min(slowest, rates[others[last]][region])
                key = (visited | 1 << i, i)
                if key not in longer or longer[key][0] < candidate:
                    longer[key] = (candidate, [*path, region])
        best = longer
    _, path = max((min(slowest, rates[path[-1]][first]), path) for slowest, path in best.values())
    return [first, *path]


def _nearest(used: list[int], rates: tuple[tuple[float, ...], ...]) -> list[int]:
    order, left = [used[0]], set(used[1:])
    while left:
        here = order[-1]
        order.append(max(sorted(left), key=lambda region: rates[here][region]))
        left.remove(order[-1])
    return order
