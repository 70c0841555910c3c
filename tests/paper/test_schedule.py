"""How much a worker does, and at which rate (DESIGN 4)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from halos.core.adaptation import local_steps_for
from halos.core.equations import learning_rate, learning_rate_iteration
from halos.core.messages import Assignment, MemberLost
from halos.simulation.environment import Environment
from tests.core.builders import (
    finished,
    give_samples,
    join_worker,
    meet_parent,
    only,
    receive,
    region_server,
    root_server,
    tell,
)


def rate(iteration: int) -> float:
    return learning_rate(iteration, peak=0.001, warmup=300, total=6144)


class TestLearningRate:
    """linear warm-up, then cosine to 10 %"""

    def test_warms_up_linearly(self) -> None:
        assert [rate(i) for i in (1, 30, 150, 299, 300)] == pytest.approx(
            [0.001 / 300, 0.0001, 0.0005, 0.001 * 299 / 300, 0.001]
        )

    def test_falls_along_a_cosine_to_ten_percent(self) -> None:
        half, quarter = (300 + 6144) // 2, (300 + (6144 - 300) // 4)
        assert rate(half) == pytest.approx(0.00055)
        assert rate(quarter) == pytest.approx(0.001 * (0.1 + 0.45 * (1 + math.cos(math.pi / 4))))
        assert rate(6144) == pytest.approx(0.0001)
        assert all(a > b for a, b in pairwise(rate(i) for i in range(300, 6145)))

    def test_stays_there(self) -> None:
        assert rate(6145) == rate(10**9) == pytest.approx(0.0001)

    def test_without_warm_up_it_begins_at_the_peak(self) -> None:
        assert learning_rate(0, peak=1.0, warmup=0, total=100) == 1.0
        assert learning_rate(1, peak=1.0, warmup=0, total=100) == pytest.approx(1.0, rel=1e-3)


class TestGlobalProgress:
    @pytest.mark.parametrize(
        ("progress", "h", "iteration"),
        [(0, 0, 1), (0, 7, 8), (1023, 0, 1), (1024, 0, 2), (1024 * 55 + 900, 3, 59)],
    )
    def test_iteration(self, progress: int, h: int, iteration: int) -> None:
        """inner step h = 0, 1, ... uses iteration `progress // global_batch + h + 1`"""
        assert learning_rate_iteration(progress, 1024, h) == iteration

    def test_is_what_was_issued_over_the_whole_run(self) -> None:
        """a lease carries `progress` (samples issued over the whole run when it was issued)"""
        root = root_server(1000)
        given = [only(join_worker(root, f"w{i}", fence=i + 1), Assignment) for i in range(3)]
        given.append(only(receive(root, "w0", finished(given[0])), Assignment))
        assert [assignment.lease.progress for assignment in given] == [0, 4, 8, 12]

    def test_is_never_where_the_range_starts(self) -> None:
        """(samples issued over the whole run when it was issued, never where its range starts)"""
        root = root_server(1000)
        lost = only(join_worker(root, "w0", fence=1), Assignment)
        assignment = only(join_worker(root, "w1", fence=2), Assignment)
        for _ in range(20):
            assignment = only(receive(root, "w1", finished(assignment)), Assignment)
        tell(root, MemberLost("w0"))
        again = only(receive(root, "w1", finished(assignment)), Assignment).lease
        assert again.ranges == lost.lease.ranges
        assert again.progress == 4 * 22

    def test_in_a_region_counts_on_from_the_roots_grant(self) -> None:
        region = region_server()
        meet_parent(region)
        join_worker(region)
        first = only(give_samples(region, 40, 80, progress=700), Assignment)
        second = only(receive(region, "w0", finished(first)), Assignment)
        assert (first.lease.progress, second.lease.progress) == (700, 704)

    def test_a_late_joiner_trains_at_everybodys_rate(self) -> None:
        root = root_server(1000)
        assignment = only(join_worker(root, "w0"), Assignment)
        for _ in range(20):
            assignment = only(receive(root, "w0", finished(assignment)), Assignment)
        late = only(join_worker(root, "late", fence=2), Assignment)
        assert late.lease.progress == assignment.lease.progress + 4


class TestLocalSteps:
    """`H_i = max(1, ceil(H * speed_i / fastest in the run))`"""

    @pytest.mark.parametrize(
        ("speed", "fastest", "steps"),
        [(1.0, 1.0, 8), (0.5, 1.0, 4), (0.51, 1.0, 5), (0.01, 1.0, 1), (300, 400, 6)],
    )
    def test_formula(self, speed: float, fastest: float, steps: int) -> None:
        assert local_steps_for(8, speed, fastest) == steps

    def test_in_the_reference_environment(self) -> None:
        tree = Environment.load("paper-4x4").tree()
        assert list(tree.local_steps(8).values()) == [
            *(3, 8, 8, 4),
            *(6, 5, 7, 2),
            *(8, 2, 8, 1),
            *(8, 5, 5, 7),
        ]

    def test_one_worker_runs_h(self) -> None:
        assert local_steps_for(8, 0.107, 0.107) == 8
