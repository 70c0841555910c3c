"""DESIGN 4's timing rules once more, straight from the text and without the production core."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from math import ceil

from tests.simulation.facts import Facts


@dataclass(frozen=True)
class World:
    """Speeds by region, Gbit/s between regions (inside one on the diagonal), root's region."""

    speeds: list[list[float]]
    gbps: list[list[float]]
    root: int
    step_ms: float = 238.391
    model_bytes: int = 281_706_496


def simulate(
    world: World, *, star: bool, local_steps: int, accumulation: int, batch_size: int, total: int
) -> Facts:
    """Run until the root's cumulative reported local steps reach ``total``."""
    fastest = max(speed for speeds in world.speeds for speed in speeds)
    workers = [(r, speed / fastest) for r, speeds in enumerate(world.speeds) for speed in speeds]
    steps = [max(1, ceil(local_steps * speed)) for _, speed in workers]
    regions = range(len(world.speeds))
    version, merged, unreported = ([0 for _ in regions] for _ in range(3))
    in_flight = [False for _ in regions]
    facts, issued = Facts(), 0
    heap: list[tuple[float, int, str, int, int]] = []
    order = count()

    def transfer(a: int, b: int) -> float:
        return world.model_bytes * 8 / (world.gbps[a][b] * 1e9) * 1e3

    def later(ms: float, kind: str, who: int, n: int) -> None:
        heapq.heappush(heap, (ms, next(order), kind, who, n))

    def begin_round(worker: int, now: float) -> None:
        nonlocal issued
        region, speed = workers[worker]
        samples = steps[worker] * batch_size
        facts.leases.append((worker, issued, issued + samples, issued))
        issued += samples
        exchange = 2 * transfer(region, world.root if star else region)
        compute = world.step_ms * steps[worker] / speed + worker * 1e-6
        later(now + exchange + compute, "ps" if star else "lps", worker, steps[worker])

    for worker in range(len(workers)):
        begin_round(worker, 0.0)
    while True:
        now, _, kind, who, n = heapq.heappop(heap)
        if kind == "lps":
            region = workers[who][0]
            version[region] += 1
            unreported[region] += n
            begin_round(who, now)
            if version[region] >= merged[region] + accumulation and not in_flight[region]:
                in_flight[region] = True
                later(now + transfer(region, world.root), "gps", region, unreported[region])
                unreported[region] = 0
            continue
        if kind == "merge":
            merged[who], in_flight[who] = version[who], False
            n = version[who]
        facts.events.append((kind, now, who, n))
        if kind in ("gps", "ps"):
            facts.steps += n
            if facts.steps >= total:
                facts.end_ms = now
                return facts
        if kind == "gps":
            later(now + transfer(world.root, who), "merge", who, 0)
        if kind == "ps":
            begin_round(who, now)
