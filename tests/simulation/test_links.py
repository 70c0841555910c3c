"""Links that round, in the simulator: what arrives, and what it weighs."""

from __future__ import annotations

import pytest
import torch

from halos.core.fragments import Fragments
from halos.core.messages import Push, PushAnswer, Resumed
from halos.core.samples import Report
from halos.simulation.links import RoundedLinks, ratio
from halos.wire.chunks import arrives
from halos.wire.frames import CodecName

VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(0))
MODEL = Fragments([VALUES])


def test_ratios_count_bits_and_scales() -> None:
    assert ratio("fp32") == 1
    assert ratio("bf16") == 0.5
    assert ratio("int8") == (8 + 16 / 256) / 32
    assert ratio("int4") == (4 + 16 / 64) / 32
    assert ratio("int2") == (2 + 16 / 128) / 32
    assert ratio("topk") < 1.1 / 16


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int2", "topk"])
def test_pushes_and_differences_are_rounded_and_nothing_else(codec: CodecName) -> None:
    links = RoundedLinks(codec, codec)
    rounded = Fragments([arrives(VALUES, codec)])
    assert not torch.equal(rounded.tensors[0], VALUES)
    for message in (Push(1, 1, 0, Report(), MODEL), PushAnswer(1, 1, 1, MODEL, against=7)):
        came = links("eu", "root", message)
        assert torch.equal(came.payload.tensors[0], rounded.tensors[0])  # type: ignore[union-attr]
    for message in (PushAnswer(1, 1, 1, MODEL), Resumed(1, 1, 1, True, 1, MODEL)):
        assert links("root", "eu", message) is message


def test_the_core_makes_up_for_what_they_round() -> None:
    one, other = RoundedLinks("int4", "fp32").roundings, RoundedLinks("fp32", "int8").roundings
    assert one.push is not None
    assert torch.equal(one.push(VALUES), arrives(VALUES, "int4"))
    assert one.difference is None
    assert other.difference is not None
    assert torch.equal(other.difference(VALUES), arrives(VALUES, "int8"))
    assert other.push is None
