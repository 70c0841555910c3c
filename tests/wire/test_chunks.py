"""Payloads in chunks: refused before memory is taken, resumed where they ended, whole or not."""

from __future__ import annotations

import gc
import random
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halos.core.fragments import Fragments, ModelLayout, Parameter
from halos.core.tensors import FRAGMENT_ELEMENTS
from halos.wire import chunks as module
from halos.wire.chunks import (
    BadChunk,
    Staging,
    check_manifest,
    chunks,
    layout_from,
    layout_shape,
    manifest_of,
)
from halos.wire.frames import ALIGNMENT, CHUNK_BYTES, Chunk, FragmentHeader, Manifest, Progress
from halos.wire.serde import METHODS, MalformedMessage

CodecName = Literal["fp32", "bf16"]
LAYOUT = ModelLayout(
    (
        Parameter(("embedding", "head"), (FRAGMENT_ELEMENTS // 2,), "float32"),
        Parameter(("empty",), (0,), "float32"),
        Parameter(("wide",), (2, FRAGMENT_ELEMENTS // 2), "bfloat16"),
        Parameter(("scale",), (), "float32"),
    ),
    (Parameter(("mask",), (3, 3), "bool"),),
)


def payload_of(*sizes: int, seed: int = 0) -> Fragments:
    generator = torch.Generator().manual_seed(seed)
    return Fragments([torch.randn(size, generator=generator) for size in sizes])


def same(one: Fragments, other: Fragments) -> bool:
    return len(one.tensors) == len(other.tensors) and all(
        map(torch.equal, one.tensors, other.tensors)
    )


def over_the_wire(sent: Iterator[Chunk]) -> Iterator[Chunk]:
    upload = METHODS["Upload"]
    return (upload.decode_request(upload.encode_request(chunk)) for chunk in sent)


# ---------------------------------------------------------------- layouts


def test_a_layout_comes_back_equal() -> None:
    assert layout_from(layout_shape(LAYOUT)) == LAYOUT
    assert layout_from(layout_shape(ModelLayout(()))) == ModelLayout(())


def test_a_layout_that_is_none_is_refused() -> None:
    shape = layout_shape(LAYOUT)
    first = shape.parameters[0]
    with pytest.raises(MalformedMessage, match="does not have the hash"):
        layout_from(replace(shape, hash="00"))
    for wrong, sentence in (
        (replace(first, dtype="float33"), "parameter embedding: 'float33' is no type of torch's"),
        (replace(first, dtype="nn"), "'nn' is no type"),
        (replace(first, names=()), "has no name"),
        (replace(first, shape=(2**40, 2**40)), "is too large"),
    ):
        with pytest.raises(MalformedMessage, match=sentence):
            layout_from(replace(shape, parameters=(wrong,)))


# ---------------------------------------------------------------- manifests


def manifest(*sizes: int, codec: CodecName = "fp32") -> Manifest:
    return Manifest(bytes(16), tuple([FragmentHeader(size, codec) for size in sizes]))


def test_a_manifest_of_the_model_passes() -> None:
    assert check_manifest(manifest(FRAGMENT_ELEMENTS, FRAGMENT_ELEMENTS // 2 + 1), LAYOUT) is None
    assert check_manifest(manifest(), ModelLayout(())) is None


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((FRAGMENT_ELEMENTS,), "it ends before parameter wide, after 1 of 2 fragments"),
        ((), "it ends before parameter embedding, after 0 of 2 fragments"),
        ((2**62, 1), "fragment 0, from parameter embedding on, has 4611686018427387904 elements"),
        ((FRAGMENT_ELEMENTS, 7), "fragment 1, from parameter wide on, has 7 elements instead of"),
        (
            (FRAGMENT_ELEMENTS, FRAGMENT_ELEMENTS // 2 + 1, 1),
            "it has 3 fragments, and the model only 2",
        ),
    ],
)
def test_a_manifest_of_another_model_is_refused_by_parameter(
    sizes: tuple[int, ...], problem: str
) -> None:
    found = check_manifest(manifest(*sizes), LAYOUT)
    assert found is not None
    assert problem in found


def test_empty_parameters_are_not_blamed() -> None:
    layout = ModelLayout(
        (Parameter(("none",), (0,), "float32"), Parameter(("some",), (3,), "float32"))
    )
    assert "parameter some" in (check_manifest(manifest(2), layout) or "")


def test_equal_content_is_announced_for_one_payload_and_codec_only() -> None:
    one, other = payload_of(5), payload_of(5)
    contents = [manifest_of(p, c).content for p in (one, other) for c in ("fp32", "bf16")]
    assert len({*contents}) == 4
    assert {len(content) for content in contents} == {16}
    assert manifest_of(one, "fp32") == manifest_of(one, "fp32")


def test_what_is_known_of_a_payload_goes_with_it() -> None:
    gc.collect()  # what other tests left
    before = len(module._CONTENTS)
    payload = payload_of(5)
    manifest_of(payload, "fp32")
    assert len(module._CONTENTS) == before + 1
    del payload
    gc.collect()
    assert len(module._CONTENTS) == before


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "sizes",
    [(), (1,), (ALIGNMENT,), (ALIGNMENT + 1, 3), (700_001, 262_144, 1), (0, 5)],
)
def test_a_payload_comes_whole(codec: CodecName, sizes: tuple[int, ...]) -> None:
    payload = payload_of(*sizes)
    announced = manifest_of(payload, codec)
    staging = Staging(announced)
    for chunk in over_the_wire(chunks(payload, announced)):
        assert not staging.complete
        assert chunk.offset % ALIGNMENT == 0
        assert len(chunk.data) <= CHUNK_BYTES
        staging.add(chunk)
    assert staging.complete
    expected = payload
    if codec == "bf16":
        expected = Fragments([t.bfloat16().float() for t in payload.tensors])
    assert same(staging.take(), expected)


def test_chunks_are_a_mebibyte_whatever_the_codec() -> None:
    payload = payload_of(1 << 20)
    for codec, expected in (("fp32", 4), ("bf16", 2)):
        sent = list(chunks(payload, manifest_of(payload, codec)))
        assert [len(chunk.data) for chunk in sent] == [CHUNK_BYTES] * expected


@given(
    st.lists(st.integers(0, 40 * ALIGNMENT), max_size=5),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_parts_may_come_in_any_order_and_more_than_once(
    sizes: list[int], parts: int, shuffled: random.Random
) -> None:
    payload = payload_of(*sizes)
    announced = manifest_of(payload, "fp32")
    sent = [
        chunk
        for part in range(parts)
        for chunk in chunks(payload, announced, part=part, parts=parts)
    ]
    everything = sent + sent[: len(sent) // 2]
    shuffled.shuffle(everything)
    staging = Staging(announced)
    for chunk in everything:
        staging.add(chunk)
    assert same(staging.take(), payload)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5])
def test_a_transfer_goes_on_where_it_was_cut_off(cut: int) -> None:
    payload = payload_of(600_000, 300_000)
    announced = manifest_of(payload, "fp32")
    staging = Staging(announced)
    first = list(chunks(payload, announced))
    for chunk in first[:cut]:
        staging.add(chunk)
    rest = list(chunks(payload, announced, staging.received()))
    assert len(rest) == len(first) - cut
    for chunk in rest:
        staging.add(chunk)
    assert same(staging.take(), payload)


def test_gaps_are_filled_by_a_transfer_that_goes_on_before_them() -> None:
    payload = payload_of(600_000)
    announced = manifest_of(payload, "fp32")
    staging = Staging(announced)
    sent = list(chunks(payload, announced))
    staging.add(sent[0])
    staging.add(sent[2])
    assert staging.received() == (Progress(0, 262_144),)
    for chunk in chunks(payload, announced, staging.received()):
        staging.add(chunk)
    assert same(staging.take(), payload)


@given(st.integers(0, 3 * ALIGNMENT), st.integers(0, 4 * ALIGNMENT))
def test_any_claim_of_what_was_received_gives_chunks_that_fit(size: int, claimed: int) -> None:
    payload = payload_of(size)
    announced = manifest_of(payload, "fp32")
    staging = Staging(announced)
    for chunk in chunks(payload, announced, (Progress(0, claimed), Progress(9, 1))):
        staging.add(chunk)
    assert staging.complete == (size == 0 or claimed < size)


def test_the_last_stretch_is_known_to_be_here() -> None:
    payload = payload_of(ALIGNMENT + 5)
    announced = manifest_of(payload, "fp32")
    staging = Staging(announced)
    for chunk in chunks(payload, announced):
        staging.add(chunk)
    assert staging.received() == (Progress(0, ALIGNMENT + 5),)
    assert not list(chunks(payload, announced, staging.received()))


# ---------------------------------------------------------------- refused

PAYLOAD = payload_of(3 * ALIGNMENT + 5, 10)
ANNOUNCED = Manifest(
    bytes(16), (FragmentHeader(3 * ALIGNMENT + 5, "fp32"), FragmentHeader(10, "bf16"))
)


def chunk_of(offset: int, count: int, fragment: int = 0, size: int | None = None) -> Chunk:
    data = bytes(4 * count if size is None else size)
    return Chunk(fragment, offset, count, zlib.crc32(data), data)


GOOD = chunk_of(ALIGNMENT, ALIGNMENT)
BAD = {
    "unknown fragment": (replace(GOOD, fragment=2), "a chunk is of fragment 2 of 2"),
    "beyond the end": (chunk_of(3 * ALIGNMENT, 6), "elements 12288 to 12294 are no stretch"),
    "far beyond": (chunk_of(2**62, 1), "are no stretch of fragment 0, which has 12293"),
    "empty": (chunk_of(0, 0), "elements 0 to 0 are no stretch"),
    "begins askew": (chunk_of(1, ALIGNMENT - 1), "begin and end at multiples of 4096"),
    "ends askew": (chunk_of(0, 100), "begin and end at multiples of 4096"),
    "wrong size": (
        chunk_of(0, ALIGNMENT, size=7),
        "4096 elements of .* 16384 bytes in fp32, not 7",
    ),
    "other codec": (chunk_of(0, 10, fragment=1), "are 20 bytes in bf16, not 40"),
    "damaged": (replace(GOOD, crc32=GOOD.crc32 ^ 1), "were damaged on their way"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_chunk_is_refused_and_changes_nothing(case: str) -> None:
    chunk, sentence = BAD[case]
    staging = Staging(ANNOUNCED)
    sent = list(chunks(PAYLOAD, ANNOUNCED))
    staging.add(sent[0])
    before = staging.received()
    with pytest.raises(BadChunk, match=sentence):
        staging.add(chunk)
    assert staging.received() == before
    staging.add(sent[1])
    whole = staging.take()
    assert torch.equal(whole.tensors[0], PAYLOAD.tensors[0])
    assert torch.equal(whole.tensors[1], PAYLOAD.tensors[1].bfloat16().float())


def test_a_payload_is_taken_once_and_only_whole() -> None:
    staging = Staging(ANNOUNCED)
    sent = list(chunks(PAYLOAD, ANNOUNCED))
    staging.add(sent[0])
    with pytest.raises(ValueError, match="not whole"):
        staging.take()
    staging.add(sent[1])
    staging.take()
    assert not staging.complete
    with pytest.raises(ValueError, match="taken already"):
        staging.take()
    with pytest.raises(BadChunk, match="after the payload was taken"):
        staging.add(sent[0])


# ---------------------------------------------------------------- memory


def test_nothing_is_allocated_for_what_does_not_come() -> None:
    staging = Staging(manifest(2**40))  # 4 TiB
    with pytest.raises(BadChunk):
        staging.add(chunk_of(1, 1))
    assert staging.received() == ()


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_nothing_is_left_of_updates_that_were_taken_or_given_up() -> None:
    payload = payload_of(3 * ALIGNMENT, 100)
    before = tensors_alive()
    gone = []
    for number in range(60):
        announced = manifest_of(payload, "fp32")
        staging = Staging(announced)
        for chunk in chunks(payload, announced):
            staging.add(chunk)
            if number % 3 == 0:
                break  # given up
        else:
            gone.append(weakref.ref(staging.take()))
    del staging, chunk
    assert len(gone) == 40
    assert all(taken() is None for taken in gone)
    assert tensors_alive() == before
