"""Codecs of few bits: how far off they may be, what they refuse, and what many pushes add up to."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from halos.codec.blocks import PIECE, Even, Quarters
from halos.codec.codecs import CODECS, COMPRESSED, ROUNDING
from halos.codec.entropy import Compressed
from halos.codec.sparse import HEADER, SHARE, TopK

NAMES = [codec.name for codec in (*ROUNDING, *COMPRESSED)]
EVERY = pytest.mark.parametrize("name", NAMES)
NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32)
TENSORS = arrays(np.float32, st.integers(0, 700), elements=NUMBERS).map(torch.from_numpy)
INF, NAN = float("inf"), float("nan")


def round_trip(name: str, values: Tensor) -> Tensor:
    codec = CODECS[name]
    data = codec.encode(values)
    assert codec.fits(len(data), values.numel())
    assert len(data) <= codec.size(values.numel())
    out = torch.full(values.shape, 77.0)
    # As they come from a wire: read only, and not aligned to anything.
    codec.decode(memoryview(b"x" + bytes(data))[1:], out)
    return out


def gradient(elements: int, seed: int = 0) -> Tensor:
    """With heavier tails than a normal distribution has."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=made) * torch.rand(elements, generator=made)


@EVERY
@pytest.mark.parametrize(
    "values",
    [
        torch.tensor(1.5),
        torch.empty(0),
        torch.tensor([-2.25]),
        torch.linspace(-3, 3, 4097),
        torch.arange(15.0).view(3, 5) - 7,
        torch.zeros(1000),
        torch.tensor([1e-45, -1e-40, 1.1754942e-38]),
        torch.tensor([3.0e38, -3.0e38]),
        gradient(PIECE + 77),
        gradient(3 * PIECE),
    ],
    ids=["0-d", "empty", "one", "odd", "2-d", "zero", "denormal", "large", "over", "pieces"],
)
def test_every_shape_arrives_and_is_never_farther_off_than_nothing_would_be(
    name: str, values: Tensor
) -> None:
    arrived = round_trip(name, values)
    assert arrived.isfinite().all()
    size = values.double().norm()
    assert (values.double() - arrived.double()).norm() <= size * (1 + 2**-7)
    assert not arrived[values == 0].any() or "int2" in name


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrower_types_and_parts_of_larger_tensors_come_through(
    name: str, dtype: torch.dtype
) -> None:
    values = gradient(999).to(dtype)
    assert torch.equal(round_trip(name, values), round_trip(name, values.float()))
    columns = gradient(1998).view(999, 2)
    assert torch.equal(
        round_trip(name, columns[:, 1].contiguous()), round_trip(name, columns.t()[1].clone())
    )


@settings(deadline=None)
@given(TENSORS, st.sampled_from([8, 4]))
def test_even_levels_are_off_by_half_a_step_at_most(values: Tensor, bits: int) -> None:
    codec = Even(bits, 64)
    out = torch.empty_like(values)
    codec.decode(codec.encode(values), out)
    for start in range(0, len(values), 64):
        block = values[start : start + 64].double()
        largest = block.abs().max()
        bound = largest / (2**bits - 2) + largest / 256 + 2.0**-100
        assert (out[start : start + 64].double() - block).abs().max() <= bound


@settings(deadline=None)
@given(TENSORS)
def test_two_bits_bring_every_block_nearer(values: Tensor) -> None:
    codec = Quarters(128)
    out = torch.empty_like(values)
    codec.decode(codec.encode(values), out)
    for start in range(0, len(values), 128):
        block, arrived = (t[start : start + 128].double() for t in (values, out))
        assert (block - arrived).norm() <= block.norm() * (1 + 2**-7) + 2.0**-90


def test_the_largest_are_kept_and_the_others_are_zero() -> None:
    values = gradient(100_000)
    arrived = round_trip("topk", values)
    kept = arrived != 0
    assert 0.8 / SHARE < kept.float().mean() < 1.25 / SHARE
    assert values[kept].abs().min() > values[~kept].abs().mean() * 2
    assert ((values[kept] - arrived[kept]).abs() <= values.abs().max() / 14 + 0.02).all()


def test_of_a_few_that_are_not_zero_none_is_lost() -> None:
    values = torch.zeros(100_000)
    values[[0, 255, 511, 70_000, 99_999]] = torch.tensor([1.0, -1.0, 0.5, 2.0, -2.0])
    arrived = round_trip("topk", values)
    assert arrived.nonzero().view(-1).tolist() == [0, 255, 511, 70_000, 99_999]


@EVERY
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 999, 1023])
def test_what_is_not_finite_arrives_as_such(name: str, bad: float, place: int) -> None:
    """The receiver refuses it, tells whose it was, and counts it."""
    values = gradient(1024)
    values[place] = bad
    assert not round_trip(name, values).isfinite().all()


@EVERY
def test_equal_values_give_equal_bytes_in_any_thread(name: str) -> None:
    values = gradient(PIECE + 5)
    first = bytes(CODECS[name].encode(values))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: bytes(CODECS[name].encode(values)), range(8))) == {first}


@EVERY
def test_with_error_feedback_what_arrives_adds_up_to_what_was_sent(name: str) -> None:
    lost, sent, arrived = (torch.zeros(2048) for _ in range(3))
    steady = gradient(2048, seed=1)
    for push in range(200):
        change = steady + 0.5 * gradient(2048, seed=2 + push)
        wanted = change + lost
        came = round_trip(name, wanted)
        lost = wanted - came
        sent, arrived = sent + change, arrived + came
    assert (sent - arrived - lost).norm() < 1e-3 * sent.norm()
    assert lost.norm() < 0.2 * sent.norm()  # and does not grow with their number


def damaged(data: bytes, how: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(how.randint(1, 4)):
        match how.randrange(4):
            case 0 if changed:
                changed[how.randrange(len(changed))] ^= 1 << how.randrange(8)
            case 1:
                del changed[how.randrange(len(changed) + 1) :]
            case 2:
                changed += how.randbytes(how.randint(1, 9))
            case _ if len(changed) > 8:
                changed[:8] = how.randbytes(8)
    return bytes(changed)


@EVERY
def test_damaged_bytes_are_refused_or_stay_within_their_stretch(name: str) -> None:
    whole = torch.full((3000,), 5.0)
    data, how = bytes(CODECS[name].encode(gradient(1000))), random.Random(0)
    refused = 0
    for _ in range(400):
        try:
            CODECS[name].decode(damaged(data, how), whole[1000:2000])
        except ValueError:
            refused += 1
        assert (whole[:1000] == 5).all()
        assert (whole[2000:] == 5).all()
    assert refused > 50


@EVERY
def test_a_compressed_bomb_takes_no_memory(name: str) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    for data in (bomb, b"\1" + bomb, b"\1" + bomb[:200], b"\2" + bytes(20), b""):
        with pytest.raises(ValueError, match=r"elements|announced|compressed|said to be"):
            CODECS[name].decode(data, torch.empty(1000))


@pytest.mark.parametrize("count", [0, 1, 5, 100, 2**32 - 1])
@pytest.mark.parametrize("size", [0, 3, 2**32 - 1])
def test_a_sparse_stretch_that_lies_about_its_size_is_refused(count: int, size: int) -> None:
    codec = TopK()
    good = bytes(codec.encode(gradient(1000)))
    true = HEADER.unpack_from(good)
    assert (count, size) != true
    with pytest.raises(ValueError, match="elements"):
        codec.decode(HEADER.pack(count, size) + good[HEADER.size :], torch.empty(1000))


def test_what_does_not_get_smaller_is_sent_as_it_is() -> None:
    codec = Compressed(Even(8, 256))
    even = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = bytes(codec.encode(even))
    assert data[0] == 0
    assert len(data) == codec.size(4096)
    assert bytes(codec.encode(torch.zeros(4096)))[0] == 1
