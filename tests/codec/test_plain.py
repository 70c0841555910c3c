"""Codecs on every kind of tensor that a model may consist of."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halos.codec.codecs import CODECS, PLAIN

EVERY = pytest.mark.parametrize("name", [codec.name for codec in PLAIN])
INF, NAN = float("inf"), float("nan")
CASES = {
    "0-d": torch.tensor(1.5),
    "empty": torch.empty(0),
    "one": torch.tensor([-2.25]),
    "odd": torch.linspace(-3, 3, 4097),
    "two dimensions": torch.arange(15.0).view(3, 5),
    "all zero": torch.zeros(100),
    "negative zero": torch.tensor([-0.0, 0.0]),
    "not finite": torch.tensor([INF, -INF, NAN, 1.0]),
    "denormal": torch.tensor([1e-45, -1e-40, 1.1754942e-38]),
    "largest": torch.tensor([3.4028235e38, -3.4028235e38]),
}


def round_trip(name: str, values: Tensor) -> Tensor:
    codec = CODECS[name]
    data = codec.encode(values)
    assert len(data) == codec.size(values.numel())
    out = torch.full(values.shape, 77.0)
    # As they come from a wire: read only, and not aligned to anything.
    codec.decode(memoryview(b"x" + bytes(data))[1:], out)
    return out


def bits(values: Tensor) -> list[int]:
    return values.reshape(-1).view(torch.int32).tolist()


@pytest.mark.parametrize("case", CASES)
def test_fp32_keeps_every_bit(case: str) -> None:
    assert bits(round_trip("fp32", CASES[case])) == bits(CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_bf16_rounds_as_torch_does(case: str) -> None:
    assert bits(round_trip("bf16", CASES[case])) == bits(CASES[case].bfloat16().float())


@pytest.mark.parametrize("case", CASES)
def test_fp16_rounds_as_torch_does(case: str) -> None:
    expected = CASES[case].half().float()
    assert bits(torch.nan_to_num(round_trip("fp16", CASES[case]))) == bits(expected.nan_to_num())


def test_bf16_rounds_ties_to_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # halfway between two neighbours
    assert round_trip("bf16", ties).tolist() == [1.0, 1 + 2**-6]


@EVERY
def test_what_is_not_a_number_stays_what_it_is(name: str) -> None:
    out = round_trip(name, CASES["not finite"])
    assert out[:2].tolist() == [INF, -INF]
    assert out[2].isnan()
    assert out[3] == 1.0


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrower_types_come_through(name: str, dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 33).bfloat16().to(dtype)
    assert torch.equal(round_trip(name, values), values.float())


@EVERY
def test_gradients_are_left_out(name: str) -> None:
    values = torch.ones(3, requires_grad=True)
    assert round_trip(name, values).tolist() == [1.0, 1.0, 1.0]


@EVERY
def test_decoding_writes_within_its_stretch_only(name: str) -> None:
    whole = torch.zeros(10)
    CODECS[name].decode(CODECS[name].encode(torch.ones(4)), whole[3:7])
    assert whole.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]


@EVERY
@pytest.mark.parametrize("off_by", [-1, 1, 4])
def test_another_size_is_refused_before_anything_is_written(name: str, off_by: int) -> None:
    codec, out = CODECS[name], torch.zeros(5)
    data = bytes(codec.size(5) + off_by)
    with pytest.raises(ValueError, match=f"{len(data)} bytes are not 5 elements in {name}"):
        codec.decode(data, out)
    assert not out.any()


def test_bytes_are_little_endian() -> None:
    assert bytes(CODECS["fp32"].encode(torch.tensor([1.5, -2.0]))) == struct.pack("<ff", 1.5, -2.0)
    assert bytes(CODECS["bf16"].encode(torch.tensor([1.5]))) == struct.pack("<f", 1.5)[2:]


@EVERY
@given(st.lists(st.floats(width=32), max_size=40), st.data())
def test_a_whole_is_its_stretches(name: str, numbers: list[float], data: st.DataObject) -> None:
    values = torch.tensor(numbers)
    cut = data.draw(st.integers(0, len(numbers)))
    codec = CODECS[name]
    parts = [bytes(codec.encode(part)) for part in (values[:cut], values[cut:])]
    assert b"".join(parts) == bytes(codec.encode(values))
