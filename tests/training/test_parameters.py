from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halos.core.fragments import Fragments
from halos.errors import UserError
from halos.training.model import ModelSettings, build_model
from halos.training.parameters import (
    difference,
    gather,
    l2_norm,
    layout_of,
    scatter,
    to_state_dict,
)


class Odd(nn.Module):
    """Every shape and type of parameter that a layout has to cope with."""

    def __init__(self) -> None:
        super().__init__()
        numbers = iter(range(1, 100))

        def filled(*shape: int) -> Tensor:
            return torch.tensor([float(next(numbers)) for _ in range(torch.Size(shape).numel())])

        self.scalar = nn.Parameter(filled()[0])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.vector = nn.Parameter(filled(5))
        self.short = nn.Parameter(filled(2, 2).view(2, 2).bfloat16())
        self.turned = nn.Parameter(filled(2, 3).view(3, 2).t())
        self.sliced = nn.Parameter(filled(4).repeat_interleave(2).view(4, 2)[:, 0])
        self.again = self.vector
        self.register_buffer("table", torch.zeros(3))


@pytest.fixture(params=[3, 7, 1000])
def odd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Odd:
    monkeypatch.setattr("halos.core.fragments.FRAGMENT_ELEMENTS", request.param)
    return Odd()


def test_the_layout_lists_parameters_in_order_and_tied_ones_once(odd: Odd) -> None:
    assert [(p.names, p.shape, p.dtype) for p in layout_of(odd).parameters] == [
        (("scalar",), (), "float32"),
        (("empty",), (0, 3), "float32"),
        (("vector", "again"), (5,), "float32"),
        (("short",), (2, 2), "bfloat16"),
        (("turned",), (2, 3), "float32"),
        (("sliced",), (4,), "float32"),
    ]


def test_gathering_lays_parameters_end_to_end(odd: Odd) -> None:
    layout = layout_of(odd)
    fragments = gather(odd, layout)
    assert [len(t) for t in fragments.tensors] == [b - a for a, b in layout.fragments]
    flat = torch.cat(fragments.tensors)
    assert flat.dtype == torch.float32
    # the turned matrix holds 11..16 by columns
    expected = [1, *range(2, 7), *range(7, 11), 11, 13, 15, 12, 14, 16, *range(17, 21)]
    assert flat.tolist() == expected
    odd.vector.data.zero_()
    assert torch.equal(torch.cat(fragments.tensors), flat), "must be a copy"


def test_scattering_is_the_inverse_of_gathering(odd: Odd) -> None:
    layout = layout_of(odd)
    where = {name: p.data_ptr() for name, p in odd.named_parameters()}
    wanted = gather(odd, layout)
    for parameter in odd.parameters():
        parameter.data.zero_()
    scatter(odd, layout, wanted)
    assert torch.equal(torch.cat(gather(odd, layout).tensors), torch.cat(wanted.tensors))
    assert {name: p.data_ptr() for name, p in odd.named_parameters()} == where, "must be in place"
    assert odd.again is odd.vector
    assert odd.short.dtype == torch.bfloat16


def test_the_difference_is_start_minus_end(odd: Odd) -> None:
    layout = layout_of(odd)
    start = gather(odd, layout)
    kept = torch.cat(start.tensors)
    for parameter in odd.parameters():
        parameter.data.mul_(0.5)
    change = difference(start, odd, layout)
    torch.testing.assert_close(torch.cat(change.tensors), kept / 2, rtol=0, atol=0)
    assert torch.equal(torch.cat(start.tensors), kept), "the start belongs to others"
    assert l2_norm(change) == pytest.approx(float(kept.norm()) / 2)


def test_bf16_parameters_round_and_their_difference_does_not(odd: Odd) -> None:
    layout = layout_of(odd)
    start = Fragments([torch.full_like(t, 1 + 2**-12) for t in gather(odd, layout).tensors])
    scatter(odd, layout, start)
    assert odd.short.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    change = to_state_dict(layout, difference(start, odd, layout))
    assert change["short"].float().tolist() == [[2**-12] * 2] * 2
    assert change["vector"].tolist() == [0.0] * 5


def test_a_state_dict_has_shapes_types_and_first_names(odd: Odd) -> None:
    layout = layout_of(odd)
    state = to_state_dict(layout, gather(odd, layout))
    assert list(state) == ["scalar", "empty", "vector", "short", "turned", "sliced"]
    for name, tensor in state.items():
        parameter = odd.get_parameter(name)
        assert tensor.dtype == parameter.dtype
        assert torch.equal(tensor, parameter)


def test_tied_stays_tied(sizes: ModelSettings) -> None:
    model = build_model(sizes, 0)
    layout = layout_of(model)
    assert layout.parameters[0].names == ("embedding.weight", "head.weight")
    scatter(model, layout, Fragments([torch.ones_like(t) for t in gather(model, layout).tensors]))
    assert model.head.weight is model.embedding.weight
    assert layout_of(model) == layout
    untied = build_model(sizes.model_copy(update={"tied": False}), 0)
    assert layout_of(untied).numel == layout.numel + 32 * 16


def test_a_module_without_parameters_has_no_fragments() -> None:
    module = nn.Identity()
    layout = layout_of(module)
    assert gather(module, layout).tensors == ()
    scatter(module, layout, Fragments([]))
    assert l2_norm(difference(Fragments([]), module, layout)) == 0


def test_what_does_not_fit_is_refused_by_name(sizes: ModelSettings) -> None:
    model = build_model(sizes, 0)
    layout = layout_of(model)
    with pytest.raises(ValueError, match="another layout"):
        scatter(model, layout, Fragments([torch.zeros(3)]))
    with pytest.raises(ValueError, match=r"no parameter embedding\.weight"):
        gather(nn.Identity(), layout)
    wider = build_model(sizes.model_copy(update={"ffn_width": 40}), 0)
    with pytest.raises(ValueError, match=r"parameter layers\.0\.gate_up\.weight has shape \(80, "):
        gather(wider, layout)


def test_only_real_numbers_can_be_trained() -> None:
    module = nn.Module()
    module.waves = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UserError, match="parameter waves is of type complex64"):
        layout_of(module)


def test_what_is_not_trained_does_not_travel(odd: Odd) -> None:
    before = layout_of(odd)
    odd.short.requires_grad_(False)
    odd.scalar.requires_grad_(False)
    layout = layout_of(odd)
    assert layout.numel == before.numel - 5
    assert [p.names[0] for p in layout.constants] == ["scalar", "short", "table"]
    assert layout.hash != before.hash
    start = gather(odd, layout)
    scatter(odd, layout, Fragments([torch.zeros_like(t) for t in start.tensors]))
    assert odd.vector.tolist() == [0.0] * 5
    assert odd.scalar.item() == 1.0
