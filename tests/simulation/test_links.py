"""Links that round: bounds of one transfer, and what error feedback and shadows make of many."""

from __future__ import annotations

import pytest
import torch

from halos.core.fragments import Fragments
from halos.core.messages import Push, PushAnswer, Resumed
from halos.core.samples import Report
from halos.simulation.links import BLOCKS, CompressedLinks, LinkCodec, ratio, rounded

SIZE = 1000  # no multiple of any block


def noise(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def push(sequence: int, change: torch.Tensor) -> Push:
    return Push(sequence, 1, 0, Report(), Fragments([change]))


def only(message: object) -> torch.Tensor:
    (tensor,) = message.payload.tensors  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("codec", BLOCKS)
def test_what_arrives_is_within_half_a_step_of_the_block(codec: LinkCodec) -> None:
    values, blocks = noise(1), BLOCKS[codec]
    arrived = rounded(values, codec)
    levels = 2 ** (blocks.bits - 1) - 1
    for start in range(0, SIZE, blocks.size):
        block = values[start : start + blocks.size]
        step = block.abs().max() / levels
        error = (arrived[start : start + blocks.size] - block).abs().max()
        # The scale itself is rounded to bf16, by up to 2^-8 of the largest value.
        assert error <= step / 2 + block.abs().max() / 256


@pytest.mark.parametrize("codec", ["fp32", "bf16", *BLOCKS])
def test_zero_stays_zero_and_signs_stay(codec: LinkCodec) -> None:
    values = torch.cat([torch.zeros(64), noise(2), torch.zeros(1)])
    arrived = rounded(values, codec)
    assert arrived.shape == values.shape
    assert not arrived[:64].any()
    assert (arrived * values >= 0).all()


def test_ratios_count_bits_and_scales() -> None:
    assert ratio("fp32") == 1
    assert ratio("bf16") == 0.5
    assert ratio("int8") == (8 + 16 / 256) / 32
    assert ratio("int4") == (4 + 16 / 64) / 32


@pytest.mark.parametrize("codec", BLOCKS)
def test_with_error_feedback_the_sum_of_what_arrives_tends_to_the_sum_of_what_was_sent(
    codec: LinkCodec,
) -> None:
    links = CompressedLinks(codec, "fp32", Fragments([torch.zeros(SIZE)]))
    sent, arrived = torch.zeros(SIZE), torch.zeros(SIZE)
    worst = 0.0
    for sequence in range(1, 41):
        change = noise(sequence)
        sent += change
        arrived += only(links("eu", "root", push(sequence, change)))
        links("root", "eu", PushAnswer(sequence, 1, sequence, Fragments([torch.zeros(SIZE)])))
        worst = max(worst, (sent - arrived).abs().max().item())
    levels = 2 ** (BLOCKS[codec].bits - 1) - 1
    assert worst < 12 / levels  # what is owed stays about one step of a block, however many pushes


def test_a_push_that_is_cut_again_settles_once() -> None:
    links = CompressedLinks("int4", "fp32", Fragments([torch.zeros(SIZE)]))
    links("eu", "root", push(1, noise(1)))  # lost on its way
    first = only(links("eu", "root", push(1, noise(2))))
    fresh = CompressedLinks("int4", "fp32", Fragments([torch.zeros(SIZE)]))
    assert first.equal(only(fresh("eu", "root", push(1, noise(2)))))


def test_models_come_down_as_rounded_differences_and_do_not_drift() -> None:
    start = noise(0)
    links = CompressedLinks("fp32", "int8", Fragments([start]))
    model = start
    for version in range(1, 30):
        model = model + noise(version, scale=0.01)
        arrived = only(links("root", "eu", PushAnswer(version, 1, version, Fragments([model]))))
        assert (arrived - model).abs().max() < 1e-3
    assert not arrived.equal(model)


def test_each_region_has_a_shadow_of_its_own_and_a_reset_brings_the_whole_model() -> None:
    start, model = torch.zeros(SIZE), noise(3)
    links = CompressedLinks("fp32", "int4", Fragments([start]))
    eu = only(links("root", "eu", PushAnswer(1, 1, 1, Fragments([model]))))
    us = only(links("root", "us", PushAnswer(1, 1, 1, Fragments([model]))))
    assert eu.equal(us)
    whole = links("root", "eu", Resumed(2, 2, 0, True, 1, Fragments([model])))
    assert only(whole).equal(model)
    again = only(links("root", "eu", PushAnswer(1, 2, 2, Fragments([model]))))
    assert again.equal(model)  # no difference is left to round
