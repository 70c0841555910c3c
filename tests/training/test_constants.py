from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from halos.core.fragments import ModelLayout, Parameter, first_difference
from halos.errors import UserError
from halos.training.constants import (
    constants_blob,
    constants_of,
    load_constants,
    warn_of_running_averages,
)
from halos.training.parameters import layout_of


class Mixed(nn.Module):
    """A trained head on frozen parts of every kind."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.scalar = nn.Parameter(torch.tensor(float(fill)), requires_grad=False)
        self.count = nn.Parameter(torch.tensor([int(fill)]), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.short = nn.Parameter(
            torch.full((3, 2), float(fill)).bfloat16().t(), requires_grad=False
        )
        self.again = self.short
        self.register_buffer("mask", torch.tensor([fill > 0, False]))
        self.register_buffer("sliced", torch.full((4, 2), float(fill))[:, 0])
        self.register_buffer("wide", torch.full((2,), fill, dtype=torch.float64))
        self.register_buffer("scratch", torch.full((2,), fill), persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("table", torch.full((2,), fill))
        self.inner.register_buffer("none", None)


NAMES = ["scalar", "count", "empty", "short", "mask", "sliced", "wide", "inner.table"]


def test_constants_are_frozen_parameters_and_persistent_buffers() -> None:
    mixed = Mixed(1)
    assert list(constants_of(mixed)) == NAMES
    layout = layout_of(mixed)
    assert [p.names[0] for p in layout.parameters] == ["head.weight", "head.bias"]
    assert [p.names for p in layout.constants] == [
        ("short", "again") if name == "short" else (name,) for name in NAMES
    ]
    assert [p.dtype for p in layout.constants[:4]] == ["float32", "int64", "float32", "bfloat16"]


def test_constants_arrive_as_they_were() -> None:
    one, other = Mixed(3), Mixed(0)
    where = {name: t.data_ptr() for name, t in constants_of(other).items()}
    load_constants(other, constants_blob(one))
    for name, tensor in constants_of(other).items():
        assert torch.equal(tensor, constants_of(one)[name]), name
        assert tensor.dtype == constants_of(one)[name].dtype
        assert tensor.data_ptr() == where[name], "in place"
    assert other.again is other.short
    assert other.scratch.tolist() == [0.0, 0.0]


def test_a_model_without_constants_has_an_empty_blob() -> None:
    load_constants(nn.Linear(2, 2), constants_blob(nn.Linear(3, 3)))


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    state = {name: tensor.detach().contiguous() for name, tensor in constants_of(Mixed(1)).items()}
    change(state)
    return save(state)


@pytest.mark.parametrize(
    ("blob", "says"),
    [
        (b"", "the run's constants are damaged"),
        (b"no constants at all", "the run's constants are damaged"),
        (changed(lambda s: s.pop("mask")), "constant mask is not one of the run's model"),
        (changed(lambda s: s.update(more=torch.ones(1))), "constant more is one of the run's"),
        (
            changed(lambda s: s.update(sliced=torch.ones(5))),
            r"constant sliced is of shape \(4,\) and type float32, but in the run of \(5,\)",
        ),
        (changed(lambda s: s.update(scalar=torch.tensor(1))), "constant scalar .* and int64"),
    ],
)
def test_other_constants_are_refused_whole(blob: bytes, says: str) -> None:
    mixed = Mixed(7)
    with pytest.raises(UserError, match=says):
        load_constants(mixed, blob)
    assert mixed.scalar.item() == 7.0
    assert mixed.wide.tolist() == [7.0, 7.0]


def test_a_type_that_cannot_be_sent_is_named() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("waves", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UserError, match="constant waves is of type complex128"):
        constants_blob(module)


def test_running_averages_are_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_running_averages(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert "the running averages of 1 stay each worker's own" in caplog.text
    caplog.clear()
    warn_of_running_averages(nn.BatchNorm1d(2, track_running_stats=False))
    assert caplog.text == ""


# ---------------------------------------------------------------- which parameter differs

A = Parameter(("a",), (2, 3), "float32")
B = Parameter(("b", "c"), (4,), "bfloat16")
K = Parameter(("k",), (), "int64")
HERE = ModelLayout((A, B), (K,))


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (ModelLayout((A, B), (K,)), None),
        (ModelLayout((A,), (K,)), "parameter b is here but not there"),
        (ModelLayout((A, B)), "constant k is here but not there"),
        (
            ModelLayout((A, B, Parameter(("d",), (1,), "float32")), (K,)),
            "parameter d is there but not here",
        ),
        (
            ModelLayout((Parameter(("a",), (3, 2), "float32"), B), (K,)),
            "parameter a has shape (2, 3) here and (3, 2) there",
        ),
        (
            ModelLayout((A, Parameter(("b", "c"), (4,), "float16")), (K,)),
            "parameter b is of type bfloat16 here and float16 there",
        ),
        (
            ModelLayout((A, Parameter(("b",), (4,), "bfloat16")), (K,)),
            "parameter b is tied otherwise: b, c here, untied there",
        ),
        (ModelLayout((A,), (K, B)), "parameter b is a constant there"),
        (ModelLayout((B, A), (K,)), "parameter a comes as number 1 here and as number 2 there"),
    ],
)
def test_the_first_difference_is_named(there: ModelLayout, says: str | None) -> None:
    assert first_difference(HERE, there) == says
    assert (HERE.hash == there.hash) is (says is None)


SOME = st.lists(
    st.builds(
        Parameter,
        st.sampled_from([("a",), ("b",), ("a", "b"), ("c",)]),
        st.sampled_from([(), (1,), (2, 1)]),
        st.sampled_from(["float32", "float16"]),
    ),
    max_size=3,
    unique_by=lambda p: p.names[0],
).map(tuple)
LAYOUTS = st.builds(ModelLayout, SOME, SOME).filter(
    lambda layout: (
        len(names := [n for p in layout.parameters + layout.constants for n in p.names])
        == len(set(names))
    )
)


@given(LAYOUTS, LAYOUTS)
def test_layouts_without_a_difference_are_equal(one: ModelLayout, other: ModelLayout) -> None:
    assert (first_difference(one, other) is None) is (one == other) is (one.hash == other.hash)
    assert (first_difference(other, one) is None) is (one == other)
