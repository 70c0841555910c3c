"""The production core against a simulation written from DESIGN 4's text alone, anywhere."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halos.simulation.environment import Environment, EnvironmentRegion
from tests.simulation.facts import Facts, production
from tests.simulation.reference import World, simulate


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Regions of unlike size; numbers without a pattern, but for speeds that may be all alike."""
    random = Random(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    alike = draw(st.booleans())
    speeds = [[1.0 if alike else random.uniform(0.05, 2.0) for _ in range(n)] for n in sizes]
    gbps = [[random.uniform(0.05, 2.0) for _ in sizes] for _ in sizes]
    for a in range(len(sizes)):
        gbps[a][a] = random.uniform(1.0, 200.0)
        for b in range(a):
            gbps[b][a] = gbps[a][b]
    return World(
        speeds=speeds,
        gbps=gbps,
        root=draw(st.integers(0, len(sizes) - 1)),
        step_ms=random.uniform(1.0, 500.0),
        model_bytes=random.randint(1, 500_000_000),
    )


@st.composite
def variations(draw: st.DrawFn) -> World:
    """``paper-4x4`` with other numbers of three digits."""
    digits = st.integers(100, 999).map(lambda n: n / 1000)
    gbps = [[100.0] * 4 for _ in range(4)]
    for a in range(4):
        for b in range(a):
            gbps[a][b] = gbps[b][a] = draw(digits)
    return World([[draw(digits) for _ in range(4)] for _ in range(4)], gbps, root=0)


def environment_of(world: World) -> Environment:
    return Environment(
        name="drawn",
        step_ms=world.step_ms,
        model_bytes=world.model_bytes,
        root_region=f"r{world.root}",
        regions=tuple(
            EnvironmentRegion(name=f"r{i}", workers=tuple(speeds))
            for i, speeds in enumerate(world.speeds)
        ),
        bandwidth_gbps=tuple(map(tuple, world.gbps)),
    )


def assert_same(world: World, *, star: bool, h: int, k: int, batch_size: int, total: int) -> None:
    environment = environment_of(world)
    topology = environment.star() if star else environment.tree()
    seen = production(
        environment, topology, local_steps=h, accumulation=k, batch_size=batch_size, total=total
    )
    expected = simulate(
        world, star=star, local_steps=h, accumulation=k, batch_size=batch_size, total=total
    )
    assert order(seen) == order(expected)
    assert times(seen) == pytest.approx(times(expected), rel=1e-9)
    assert seen.leases[: len(expected.leases)] == expected.leases
    assert len(seen.leases) - len(expected.leases) == star  # one that goes out with the end
    assert seen.steps == expected.steps


def order(facts: Facts) -> list[tuple[str, int, int]]:
    return [(kind, who, n) for kind, _, who, n in facts.events]


def times(facts: Facts) -> list[float]:
    return [*(ms for _, ms, _, _ in facts.events), facts.end_ms]


@given(
    world=worlds(),
    star=st.booleans(),
    h=st.integers(1, 32),
    k=st.integers(1, 40),
    batch_size=st.integers(1, 100),
    total=st.integers(1, 3000),
)
@settings(max_examples=60)
def test_any_environment(
    world: World, star: bool, h: int, k: int, batch_size: int, total: int
) -> None:
    assert_same(world, star=star, h=h, k=k, batch_size=batch_size, total=total)


@given(world=variations(), star=st.booleans())
@settings(max_examples=10)
def test_variations_of_the_published_environment(world: World, star: bool) -> None:
    h = 32 if star else 8
    assert_same(world, star=star, h=h, k=32, batch_size=64, total=6144)
