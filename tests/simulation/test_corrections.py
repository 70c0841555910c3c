"""What is done about stale changes, in closed form."""

from __future__ import annotations

import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.state import TorchState
from halos.simulation.corrections import AgainstMomentum

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
