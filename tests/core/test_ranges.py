"""Range sets against Python's sets of positions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halos.core.ranges import RangeSet

positions = st.integers(-2, 12)  # few, so that ranges often meet
ranges = st.tuples(positions, positions)


def positions_of(held: RangeSet) -> set[int]:
    return {p for start, end in held for p in range(start, end)}


def assert_canonical(held: RangeSet) -> None:
    """Few ranges: sorted, not empty, and no two that touch."""
    parts = held.as_tuple()
    assert all(start < end for start, end in parts)
    assert all(a[1] < b[0] for a, b in pairwise(parts))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), ranges), max_size=40))
def test_adding_and_removing(steps: list[tuple[str, tuple[int, int]]]) -> None:
    held, model = RangeSet(), set[int]()
    for step, (start, end) in steps:
        span = set(range(start, end))
        allowed = not span & model if step == "add" else span <= model
        change = getattr(held, step)
        if allowed:
            change(start, end)
            model = model | span if step == "add" else model - span
        else:
            with pytest.raises(ValueError, match=f"positions {start} to {end}"):
                change(start, end)
        assert positions_of(held) == model
        assert held.total == len(model)
        assert_canonical(held)


@given(st.lists(ranges, max_size=8), ranges)
def test_asking(parts: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    model = {p for start, end in parts for p in range(start, end)}
    held = RangeSet.of((p, p + 1) for p in sorted(model))
    span = set(range(*asked))
    assert held.covers(*asked) == (span <= model)
    assert held.touches(*asked) == bool(span & model)
    assert len(held) == len(held.as_tuple())


@given(st.lists(ranges, max_size=8))
def test_a_union_is_of_disjoint_ranges_only(parts: list[tuple[int, int]]) -> None:
    spans = [set(range(*part)) for part in parts]
    union = set[int]().union(*spans)
    if len(union) < sum(map(len, spans)):
        with pytest.raises(ValueError, match="partly here already"):
            RangeSet.of(parts)
    else:
        assert positions_of(RangeSet.of(parts)) == union


def test_a_range_that_runs_backwards_is_empty() -> None:
    held = RangeSet.of([(4, 8)])
    held.add(6, 2)
    held.remove(9, 3)
    assert held.as_tuple() == ((4, 8),)
    assert held.covers(7, 5) and not held.touches(7, 5)
