"""A server's tensors: what was handed out never changes, and memory does not grow (DESIGN 3)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.state import Shared, TorchState
from halos.core.tensors import NOTHING, Payload
from tests.core.builders import PLAIN, fragments, torch_state, values

NESTEROV = OuterSettings(rate=0.5, momentum=0.5, momentum_delay=2)


def buffers(*parts: Shared) -> dict[int, Tensor]:
    """By address; who keeps them keeps their addresses from being given to others."""
    return {tensor.data_ptr(): tensor for part in parts for tensor in part}


class TestWhatWasHandedOut:
    def test_a_published_model_never_changes(self) -> None:
        state = torch_state(1.0, 2.0, outer=NESTEROV, parent=True)
        published = state.publish()
        state.apply(fragments(1.0, 1.0))
        state.cut()
        state.blend(fragments(9.0, 9.0), merge_weight=0.5, carry=True)
        state.apply(fragments(1.0, 1.0))
        state.adopt(fragments(5.0, 5.0))
        assert values(published) == [1.0, 2.0]
        assert values(state.publish()) == [5.0, 5.0]

    def test_every_version_stays_as_it_was_published(self) -> None:
        state = torch_state(0.0)
        versions = []
        for _ in range(20):
            versions.append(state.publish())
            state.apply(fragments(-1.0))
        assert [values(version) for version in versions] == [[float(i)] for i in range(20)]

    def test_a_push_cut_never_changes(self) -> None:
        state = torch_state(1.0, parent=True)
        state.apply(fragments(0.25))
        push = state.cut()
        state.apply(fragments(1.0))
        state.blend(fragments(9.0), merge_weight=0.5, carry=False)
        state.apply(fragments(1.0))
        state.cut()
        assert values(push) == [0.25]

    def test_what_was_received_is_not_written_to(self) -> None:
        state = torch_state(1.0, outer=NESTEROV, parent=True)
        g, model, start = fragments(1.0), fragments(2.0), fragments(3.0)
        state.apply(g)
        state.cut()
        state.blend(model, merge_weight=1.0, carry=False)
        state.apply(g)
        state.adopt(start)
        state.apply(g)
        assert (values(g), values(model), values(start)) == ([1.0], [2.0], [3.0])

    def test_a_snapshot_holds_the_moment_at_which_it_was_taken(self) -> None:
        state = torch_state(1.0, outer=NESTEROV, parent=True)
        state.apply(fragments(1.0))
        state.cut()
        state.apply(fragments(2.0))
        state.apply(fragments(4.0))
        before = {name: values(part) for name, part in state.capture().items()}
        snapshot = state.capture()
        state.apply(fragments(8.0))
        state.blend(fragments(9.0), merge_weight=0.5, carry=True)
        assert {name: values(part) for name, part in snapshot.items()} == before
        # buffer: 1, then 3 -> momentum 1.5, then 4; theta: 1 - .5 - (1 + .75) - 2
        assert before == {
            "theta": [-3.0 - 0.25],
            "momentum": [1.5],
            "buffer": [4.0],
            "base": [1.0],
            "at_cut": [0.5],
        }

    def test_a_restored_state_goes_on_as_the_captured_one(self) -> None:
        def on(state: TorchState) -> list[list[float]]:
            state.apply(fragments(8.0))
            state.blend(fragments(9.0), merge_weight=0.5, carry=True)
            return [values(part) for part in state.capture().values()]

        state = torch_state(1.0, outer=NESTEROV, parent=True)
        state.apply(fragments(1.0))
        state.cut()
        state.apply(fragments(2.0))
        parts = {name: part.copy() for name, part in state.capture().items()}
        restored = TorchState.restore(parts, NESTEROV, step=state.step)
        assert on(restored) == on(state)

    def test_a_cut_survives_a_restore(self) -> None:
        state = torch_state(1.0, parent=True)
        state.apply(fragments(0.5))
        state.cut()
        parts = state.capture()
        del state
        restored = TorchState.restore(parts, PLAIN, step=1)
        del parts
        restored.apply(fragments(2.0))
        restored.blend(fragments(9.0), merge_weight=1.0, carry=True)
        assert values(restored.cut()) == [2.0]


class TestMemory:
    def test_without_a_reader_updates_are_in_place(self) -> None:
        state = torch_state(0.0, outer=NESTEROV)
        used = buffers(state.theta, state.momentum, state.buffer)
        for _ in range(10):
            state.apply(fragments(1.0))
            used |= buffers(state.theta, state.momentum, state.buffer)
        assert len(used) == 3

    def test_a_thousand_updates_with_one_reader_use_two_buffers(self) -> None:
        state = torch_state(0.0, outer=NESTEROV)
        used: dict[int, Tensor] = {}
        reader = None
        for _ in range(1000):
            state.apply(fragments(1.0))
            used |= buffers(state.theta)
            reader = state.publish()
        assert reader is not None
        assert len(used) <= 3  # the newest, the one held, and one just let go

    def test_a_slow_reader_pins_one_version_only(self) -> None:
        state = torch_state(0.0)
        slow = state.publish()
        used: dict[int, Tensor] = {}
        for _ in range(1000):
            state.apply(fragments(1.0))
            used |= buffers(state.theta)
        assert values(slow) == [0.0]
        assert len(used) == 1

    def test_readers_of_one_version_share_it(self) -> None:
        state = torch_state(0.0)
        assert state.publish() is state.publish()

    def test_a_merge_reuses_buffers_too(self) -> None:
        state = torch_state(0.0, outer=NESTEROV, parent=True)
        assert state.base is not None
        used: dict[int, Tensor] = {}
        for _ in range(100):
            state.apply(fragments(1.0))
            state.cut()
            state.apply(fragments(1.0))
            state.blend(fragments(0.0), merge_weight=0.25, carry=True)
            used |= buffers(state.theta, state.base)
        assert len(used) <= 4


class TestAdopting:
    def test_starts_again_with_an_outer_optimizer_at_rest(self) -> None:
        state = torch_state(1.0, 1.0, outer=NESTEROV, parent=True)
        for g in (1.0, 2.0, 3.0):
            state.apply(fragments(g, g))
        state.cut()
        state.adopt(fragments(7.0, 8.0))
        fresh = torch_state(7.0, 8.0, outer=NESTEROV, parent=True)
        for part, expected in fresh.capture().items():
            assert values(state.capture()[part]) == values(expected)
        for g in (1.0, 2.0, 3.0):
            state.apply(fragments(g, -g))
            fresh.apply(fragments(g, -g))
        assert values(state.publish()) == values(fresh.publish())
        assert values(state.cut()) == values(fresh.cut())


def two_fragments(first: list[float], second: list[float]) -> Fragments:
    return Fragments([torch.tensor(x, dtype=torch.float64) for x in (first, second)])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (two_fragments([1.0, 2.0], [3.0]), None),
        (two_fragments([1e150, 1e150], [1e150]), None),  # its norm can be told
        (two_fragments([1e308, 1e308], [1e308]), "non_finite"),  # a few would end the parameters
        (two_fragments([1.0, math.nan], [3.0]), "non_finite"),
        (two_fragments([1.0, 2.0], [math.inf]), "non_finite"),
        (two_fragments([math.inf, -math.inf], [0.0]), "non_finite"),
        (two_fragments([1.0], [3.0]), "wrong_shape"),
        (two_fragments([1.0, 2.0, 3.0], [3.0]), "wrong_shape"),
        (Fragments([torch.zeros(2, 1).double(), torch.zeros(1).double()]), "wrong_shape"),
        (Fragments([torch.zeros(2), torch.zeros(1)]), "wrong_shape"),
        (Fragments([torch.zeros(2).double()]), "wrong_shape"),
        (Fragments([]), "wrong_shape"),
        (NOTHING, "wrong_shape"),
    ],
    ids=[
        "good", "huge", "about to overflow", "nan", "inf", "inf - inf", "short", "long",
        "two dimensions", "fp32", "a fragment is missing", "empty", "no tensors",
    ],
)  # fmt: skip
def test_what_may_be_applied(payload: Payload, reason: str | None) -> None:
    state = TorchState.start(two_fragments([0.0, 0.0], [0.0]), NESTEROV, has_parent=True)
    assert state.check(payload) == reason
    assert values(state.publish()) == [0.0, 0.0, 0.0]
