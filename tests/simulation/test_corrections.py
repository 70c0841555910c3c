"""What is done about stale changes, in closed form."""

from __future__ import annotations

import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.state import TorchState
from halos.simulation.corrections import AgainstMomentum, DelayCorrected

ONES = Fragments([torch.ones(2), torch.ones(2)])


def vectors(*values: list[float]) -> Fragments:
    return Fragments([torch.tensor(v) for v in values])


def theta(state: TorchState) -> list[list[float]]:
    return [t.tolist() for t in state.publish().tensors]


def test_what_runs_against_the_momentum_is_taken_out_fragment_by_fragment() -> None:
    settings = OuterSettings(rate=1.0, momentum=0.5)
    state = AgainstMomentum.start(ONES, settings, has_parent=False)
    plain = TorchState.start(ONES, settings, has_parent=False)
    for each in (state, plain):
        each.apply(vectors([1.0, 0.0], [0.0, 2.0]))
    assert theta(state) == theta(plain)
    state.apply(vectors([-3.0, 1.0], [1.0, 1.0]))  # the first runs against, the second does not
    plain.apply(vectors([0.0, 1.0], [1.0, 1.0]))
    assert theta(state) == theta(plain)


def test_a_region_goes_on_from_the_root_with_what_it_did_since_the_cut() -> None:
    state = DelayCorrected.start(ONES, OuterSettings(rate=1.0), has_parent=True)
    state.apply(vectors([0.25, 0.0], [0.0, 0.0]))
    (first, _) = state.cut().tensors
    assert first.tolist() == [0.25, 0.0]
    state.apply(vectors([0.0, 0.5], [0.125, 0.0]))  # while the push is under way
    state.blend(vectors([2.0, 2.0], [3.0, 3.0]), merge_weight=1.0, carry=True)
    assert theta(state) == [[2.0, 1.5], [2.875, 3.0]]
    cut = [t.tolist() for t in state.cut().tensors]
    assert cut == [[0.0, 0.5], [0.125, 0.0]]  # which enters the next push


def test_a_smaller_weight_stops_half_way() -> None:
    state = DelayCorrected.start(ONES, OuterSettings(rate=1.0), has_parent=True)
    state.cut()
    state.apply(vectors([0.0, 0.5], [0.0, 0.0]))
    state.blend(vectors([2.0, 2.0], [3.0, 3.0]), merge_weight=0.5, carry=True)
    assert theta(state) == [[1.5, 1.0], [2.0, 2.0]]
