"""Delayed Nesterov, one call a received pseudo-gradient, on both tiers (DESIGN 4)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halos.core.equations import OuterSettings
from tests.core.builders import fragments, torch_state, values
from tests.paper.plain import PlainNesterov

numbers = st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3))


@given(
    received=st.lists(st.tuples(numbers, numbers), max_size=40),
    rate=st.floats(0.01, 1.0),
    beta=st.floats(0.0, 0.95),
    delay=st.integers(1, 9),
    share=st.floats(0.0, 1.0),
    read=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_algorithm_3(
    received: list[tuple[float, float]],
    rate: float,
    beta: float,
    delay: int,
    share: float,
    read: list[bool],
) -> None:
    """buffer += g; t += 1
    if t % N == 0: m = beta*m + buffer/N; theta -= lr*((1 - c*N + c)*beta*m + g/N); buffer = 0
    else: theta -= lr*(c*beta*m + g/N)

    Whether somebody reads meanwhile, so that updates go to other buffers, makes no difference.
    """
    settings = OuterSettings(rate=rate, momentum=beta, momentum_delay=delay, momentum_share=share)
    state = torch_state(1.0, -2.0, outer=settings)
    plain = [PlainNesterov(theta, rate, beta, delay, share) for theta in (1.0, -2.0)]
    for g, wanted in zip(received, read, strict=False):
        reader = state.capture() if wanted else None
        state.apply(fragments(*g))
        for each, x in zip(plain, g, strict=True):
            each.receive(x)
        expected = [each.theta for each in plain]
        assert values(state.publish()) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        del reader


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_without_delay_it_is_sgd_with_nesterov_momentum(beta: float) -> None:
    theta = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    state = torch_state(*theta.tolist(), outer=OuterSettings(rate=0.3, momentum=beta))
    optimizer = torch.optim.SGD([theta], lr=0.3, momentum=beta, nesterov=beta > 0)
    for i in range(20):
        theta.grad = torch.sin(theta * 7 + i)
        g = theta.grad.tolist()
        optimizer.step()
        state.apply(fragments(*g))
    assert values(state.publish()) == pytest.approx(theta.tolist(), rel=1e-12)


def test_the_quoted_rate_counts_n_times() -> None:
    """`lr` here is N times the quoted rate (quoted LPS 0.2 at N 16 means 3.2)."""
    assert OuterSettings(rate=0.2, momentum=0.9, momentum_delay=16).scaled_rate == 3.2


def test_each_update_counts_at_the_quoted_rate() -> None:
    """a port that forgets it is 16 times too slow"""
    state = torch_state(0.0, outer=OuterSettings(rate=0.2, momentum=0.9, momentum_delay=16))
    for i in range(1, 16):
        state.apply(fragments(1.0))
        assert values(state.publish()) == pytest.approx([-0.2 * i])


def test_momentum_enters_at_every_nth_update() -> None:
    """if t % N == 0: m = beta*m + buffer/N; theta -= lr*(beta*m + g/N)"""
    state = torch_state(0.0, outer=OuterSettings(rate=0.2, momentum=0.9, momentum_delay=16))
    for _ in range(16):
        state.apply(fragments(1.0))
    once = -0.2 * 16 - 3.2 * 0.9  # m = 1, the mean of 16 ones
    assert values(state.publish()) == pytest.approx([once])
    for _ in range(16):
        state.apply(fragments(1.0))
    assert values(state.publish()) == pytest.approx([2 * once - 3.2 * 0.9 * 0.9])


def test_no_momentum_between_by_default() -> None:
    """`c = 0` by default."""
    assert OuterSettings(rate=1.0).momentum_share == 0.0


def test_with_c_of_one_nth_momentum_is_spread_evenly() -> None:
    """theta -= lr*(c*beta*m + g/N) between, and (1 - c*N + c) = c at every N-th for c = 1/N"""
    settings = OuterSettings(rate=0.1, momentum=0.5, momentum_delay=4, momentum_share=0.25)
    state = torch_state(0.0, outer=settings)
    for _ in range(4):
        state.apply(fragments(1.0))
    start = -0.1 * 4 - 0.4 * 0.25 * 0.5
    assert values(state.publish()) == pytest.approx([start])
    for i in range(1, 4):
        state.apply(fragments(0.0))
        assert values(state.publish()) == pytest.approx([start - 0.05 * i])
