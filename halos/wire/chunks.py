"""Payloads as chunks, and chunks as payloads: checked before anything is allocated, and whole.

A chunk is at most a mebibyte of one fragment, encoded. What has come of a payload is kept in a
:class:`Staging` until all of it is there; until then nothing of it counts.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from isal import isal_zlib
from torch import Tensor

from halos.codec.codecs import CODECS
from halos.codec.plain import Codec
from halos.core.fragments import Fragments, ModelLayout, Parameter
from halos.wire.frames import (
    ALIGNMENT,
    CHUNK_BYTES,
    Chunk,
    CodecName,
    FragmentHeader,
    LayoutShape,
    Manifest,
    ParameterShape,
    Progress,
)
from halos.wire.records import ID_BYTES, LARGEST, MalformedMessage

# ---------------------------------------------------------------- layouts


def layout_shape(layout: ModelLayout) -> LayoutShape:
    """The layout as it travels."""
    return LayoutShape(
        tuple([ParameterShape(p.names, p.shape, p.dtype) for p in layout.parameters]),
        tuple([ParameterShape(p.names, p.shape, p.dtype) for p in layout.constants]),
        layout.hash,
    )


def layout_from(shape: LayoutShape) -> ModelLayout:
    """The inverse of :func:`layout_shape`. Raises ``MalformedMessage`` for what is no layout."""
    layout = ModelLayout(
        tuple([_parameter(p) for p in shape.parameters]),
        tuple([_parameter(p) for p in shape.constants]),
    )
    if layout.numel > LARGEST:
        raise MalformedMessage(f"a model of {layout.numel} elements is too large")
    if layout.hash != shape.hash:
        raise MalformedMessage("the model's layout does not have the hash that came with it")
    return layout


def _parameter(shape: ParameterShape) -> Parameter:
    if not shape.names:
        raise MalformedMessage("a parameter of the model's layout has no name")
    if not isinstance(getattr(torch, shape.dtype, None), torch.dtype):
        raise MalformedMessage(f"parameter {shape.names[0]}: {shape.dtype!r} is no type of torch's")
    return Parameter(shape.names, shape.shape, shape.dtype)


# ---------------------------------------------------------------- sending

_CONTENTS: WeakKeyDictionary[Fragments, dict[CodecName, bytes]] = WeakKeyDictionary()


def manifest_of(payload: Fragments, codec: CodecName) -> Manifest:
    """What will be sent of ``payload``. The same again for the same payload, while it lives."""
    known = _CONTENTS.setdefault(payload, {})
    content = known.setdefault(codec, secrets.token_bytes(ID_BYTES))
    return Manifest(content, tuple([FragmentHeader(t.numel(), codec) for t in payload.tensors]))


def chunks(
    payload: Fragments,
    manifest: Manifest,
    received: Sequence[Progress] = (),
    *,
    part: int = 0,
    parts: int = 1,
) -> Iterator[Chunk]:
    """The payload in order, but for what the receiver has.

    Of several parts each has every ``parts``-th fragment, from ``part`` on. A chunk may be a view
    of the payload's memory, and is good for as long as the payload is held.
    """
    here = {progress.fragment: progress.elements for progress in received}
    for number in range(part, len(manifest.fragments), parts):
        header = manifest.fragments[number]
        codec, values = CODECS[header.codec], payload.tensors[number]
        have = here.get(number, 0)
        if have >= header.elements:
            continue
        for offset, count in stretches(header.elements, codec, have):
            data = codec.encode(values[offset : offset + count])
            yield Chunk(number, offset, count, isal_zlib.crc32(data), data)


def arrives(values: Tensor, codec: CodecName) -> Tensor:
    """What a receiver gets of a fragment that is sent in this codec."""
    encoded, got = CODECS[codec], torch.empty(len(values))
    for offset, count in stretches(len(values), encoded):
        part = slice(offset, offset + count)
        encoded.decode(encoded.encode(values[part]), got[part])
    return got


def stretches(elements: int, codec: Codec, start: int = 0) -> Iterator[tuple[int, int]]:
    """(offset, count) of each chunk of a fragment, from that on which ``start`` is in.

    Always the same ones, however often a transfer was cut off: what an element becomes may depend
    on those that it is encoded with.
    """
    step = CHUNK_BYTES // codec.size(ALIGNMENT) * ALIGNMENT
    for offset in range(start // step * step, elements, step):
        yield offset, min(step, elements - offset)


# ---------------------------------------------------------------- receiving


class BadChunk(ValueError):  # noqa: N818  the peer's fault
    """A chunk that does not fit what was announced, or was damaged on its way."""


def check_manifest(manifest: Manifest, layout: ModelLayout) -> str | None:
    """Why a payload cannot be of this model, as a part of a sentence, or ``None``.

    Allocates nothing. Names the parameter at which the first fragment that is wrong begins.
    """
    ranges = layout.fragments
    for number, (header, (start, end)) in enumerate(zip(manifest.fragments, ranges, strict=False)):
        if header.elements != end - start:
            return (
                f"fragment {number}, from parameter {_parameter_at(layout, start)} on, has "
                f"{header.elements} elements instead of {end - start}"
            )
    count = len(manifest.fragments)
    if count < len(ranges):
        missing = _parameter_at(layout, ranges[count][0])
        return f"it ends before parameter {missing}, after {count} of {len(ranges)} fragments"
    if count > len(ranges):
        return f"it has {count} fragments, and the model only {len(ranges)}"
    return None


def _parameter_at(layout: ModelLayout, element: int) -> str:
    """The parameter that this element of the flat model is of."""
    # Of several at one offset all but the last are empty.
    return layout.parameters[bisect_right(layout.offsets, element) - 1].names[0]


class Staging:
    """A payload that is coming in. Its memory is taken fragment by fragment, as they begin.

    ``manifest`` has passed :func:`check_manifest`. Chunks may come in any order.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # Of each fragment, which stretches of ALIGNMENT elements are here.
        self._here = [bytearray(-(-h.elements // ALIGNMENT)) for h in manifest.fragments]
        self._missing = sum([len(here) for here in self._here])
        self._tensors: dict[int, Tensor] | None = {}

    def add(self, chunk: Chunk) -> None:
        """Take a chunk in; one that is here already changes nothing.

        Raises :class:`BadChunk`, having changed nothing, for one that is damaged or is not of the
        announced payload.
        """
        if self._tensors is None:
            raise BadChunk("a chunk came after the payload was taken as whole")
        header = self._checked(chunk)
        here = self._here[chunk.fragment]
        end = chunk.offset + chunk.count
        blocks = slice(chunk.offset // ALIGNMENT, -(-end // ALIGNMENT))
        new = here.count(0, blocks.start, blocks.stop)
        if not new:
            return
        tensor = self._tensors.get(chunk.fragment)
        if tensor is None:
            tensor = self._tensors[chunk.fragment] = torch.empty(header.elements)
        try:
            CODECS[header.codec].decode(chunk.data, tensor[chunk.offset : end])
        except ValueError as error:
            raise BadChunk(f"a chunk of fragment {chunk.fragment}: {error}") from error
        here[blocks] = b"\1" * (blocks.stop - blocks.start)
        self._missing -= new

    def _checked(self, chunk: Chunk) -> FragmentHeader:
        """The fragment that this is a sound chunk of."""
        if not 0 <= chunk.fragment < len(self._here):
            raise BadChunk(f"a chunk is of fragment {chunk.fragment} of {len(self._here)}")
        header = self.manifest.fragments[chunk.fragment]
        end, codec = chunk.offset + chunk.count, CODECS[header.codec]
        if chunk.offset < 0 or chunk.count < 1 or end > header.elements:
            raise BadChunk(
                f"elements {chunk.offset} to {end} are no stretch of fragment {chunk.fragment}, "
                f"which has {header.elements}"
            )
        if chunk.offset % ALIGNMENT or (end % ALIGNMENT and end != header.elements):
            raise BadChunk(
                f"elements {chunk.offset} to {end} of fragment {chunk.fragment} do not begin and "
                f"end at multiples of {ALIGNMENT}"
            )
        if not codec.fits(len(chunk.data), chunk.count):
            raise BadChunk(
                f"{chunk.count} elements of fragment {chunk.fragment} are "
                f"{codec.size(chunk.count)} bytes in {header.codec}, not {len(chunk.data)}"
            )
        if isal_zlib.crc32(chunk.data) != chunk.crc32:
            raise BadChunk(
                f"elements {chunk.offset} to {end} of fragment {chunk.fragment} were damaged on "
                "their way: the checksum is another"
            )
        return header

    def received(self) -> tuple[Progress, ...]:
        """How far each fragment is here without a gap, where it is at all; for resuming."""
        fragments = self.manifest.fragments
        return tuple(
            [
                Progress(number, min(blocks * ALIGNMENT, fragments[number].elements))
                for number, here in enumerate(self._here)
                if (blocks := _before(here))
            ]
        )

    @property
    def complete(self) -> bool:
        return not self._missing and self._tensors is not None

    def take(self) -> Fragments:
        """The whole payload, once. Raises ``ValueError`` if it is not whole or was taken."""
        if not self.complete or self._tensors is None:
            raise ValueError("the payload is not whole, or was taken already")
        tensors, self._tensors = self._tensors, None
        return Fragments([tensors.get(n, torch.empty(0)) for n in range(len(self._here))])


def _before(here: bytearray) -> int:
    """Stretches before the first that is missing."""
    gap = here.find(0)
    return len(here) if gap < 0 else gap
