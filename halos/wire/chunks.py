"""Payloads as chunks, and chunks as payloads: checked before anything is allocated, and whole.

A chunk is about a mebibyte of one fragment, encoded. What has come of a payload is kept in a
:class:`Staging` until all of it is there; until then nothing of it counts.
"""

from __future__ import annotations

import secrets
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from halos.codec.plain import CODECS
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


class BadChunk(ValueError):  # noqa: N818  the peer's fault
    """A chunk that does not fit what was announced, or was damaged on its way."""


def layout_shape(layout: ModelLayout) -> LayoutShape:
    """The layout as it travels."""
    return LayoutShape(
        tuple(ParameterShape(p.names, p.shape, p.dtype) for p in layout.parameters),
        tuple(ParameterShape(p.names, p.shape, p.dtype) for p in layout.constants),
        layout.hash,
    )


def layout_from(shape: LayoutShape) -> ModelLayout:
    """The inverse of :func:`layout_shape`. ``ValueError`` if the hash is of another layout."""
    layout = ModelLayout(
        tuple(Parameter(p.names, p.shape, p.dtype) for p in shape.parameters),
        tuple(Parameter(p.names, p.shape, p.dtype) for p in shape.constants),
    )
    if layout.hash != shape.hash:
        raise ValueError("the model's layout does not have the hash that came with it")
    return layout


# ---------------------------------------------------------------- sending


def manifest_of(payload: Fragments, codec: CodecName) -> Manifest:
    """What will be sent of ``payload``, under a new random name for its content."""
    headers = tuple(FragmentHeader(tensor.numel(), codec) for tensor in payload.tensors)
    return Manifest(secrets.token_bytes(16), headers)


def chunks(
    payload: Fragments,
    manifest: Manifest,
    received: Sequence[Progress] = (),
    *,
    part: int = 0,
    parts: int = 1,
) -> Iterator[Chunk]:
    """The payload in order, but for what the receiver has; every ``parts``-th fragment from
    ``part`` on."""
    have = {progress.fragment: progress.elements for progress in received}
    for number, header in enumerate(manifest.fragments):
        if number % parts != part:
            continue
        codec, tensor = CODECS[header.codec], payload.tensors[number]
        step = _chunk_elements(header.codec)
        for offset in range(have.get(number, 0), header.elements, step):
            values = tensor[offset : offset + step]
            data = codec.encode(values)
            yield Chunk(number, offset, values.numel(), zlib.crc32(data), data)


def _chunk_elements(codec: CodecName) -> int:
    return CHUNK_BYTES // CODECS[codec].size(ALIGNMENT) * ALIGNMENT


# ---------------------------------------------------------------- receiving


def check_manifest(manifest: Manifest, layout: ModelLayout) -> str | None:
    """Why this cannot be of a model of ``layout``, or ``None``. Allocates nothing."""
    wanted = [end - start for start, end in layout.fragments]
    if len(manifest.fragments) != len(wanted):
        return f"it has {len(manifest.fragments)} fragments, and the model {len(wanted)}"
    for number, (header, elements) in enumerate(zip(manifest.fragments, wanted, strict=True)):
        if header.elements != elements:
            return (
                f"fragment {number} has {header.elements} elements, not {elements}, where parameter "
                f"{_parameter_at(layout, layout.fragments[number][0])} lies"
            )
    return None


def _parameter_at(layout: ModelLayout, element: int) -> str:
    number = bisect_right(layout.offsets, element) - 1
    while not layout.parameters[number].numel and number + 1 < len(layout.parameters):
        number += 1
    return layout.parameters[number].names[0]


class Staging:
    """A payload that is coming in. Memory is taken fragment by fragment, as chunks come.

    ``manifest`` has passed :func:`check_manifest`.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._tensors: list[torch.Tensor | None] = [None] * len(manifest.fragments)
        self._have = [0] * len(manifest.fragments)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk in; one that is here already changes nothing.

        Raises :class:`BadChunk`, having changed nothing, for any other that is not the next of its
        fragment, is damaged, or is not of the announced size.
        """
        if not 0 <= chunk.fragment < len(self._have):
            raise BadChunk(f"there is no fragment {chunk.fragment}")
        header, have = self.manifest.fragments[chunk.fragment], self._have[chunk.fragment]
        end = chunk.offset + chunk.count
        if chunk.count < 1 or chunk.offset % ALIGNMENT or end > header.elements:
            raise BadChunk(
                f"elements {chunk.offset} to {end} are no chunk of fragment {chunk.fragment}, "
                f"which has {header.elements}"
            )
        if zlib.crc32(chunk.data) != chunk.crc32:
            raise BadChunk(f"a chunk of fragment {chunk.fragment} was damaged on its way")
        if end <= have:
            return
        if chunk.offset != have:
            raise BadChunk(
                f"a chunk at element {chunk.offset} of fragment {chunk.fragment} came while {have} "
                "was the next"
            )
        tensor = self._tensors[chunk.fragment]
        if tensor is None:
            tensor = self._tensors[chunk.fragment] = torch.empty(header.elements)
        try:
            CODECS[header.codec].decode(chunk.data, tensor[chunk.offset : end])
        except ValueError as error:
            raise BadChunk(f"fragment {chunk.fragment}: {error}") from error
        self._have[chunk.fragment] = end

    def received(self) -> tuple[Progress, ...]:
        """What is here, of fragments of which anything is."""
        return tuple(Progress(n, have) for n, have in enumerate(self._have) if have)

    @property
    def complete(self) -> bool:
        return all(
            have == header.elements
            for have, header in zip(self._have, self.manifest.fragments, strict=True)
        )

    def take(self) -> Fragments:
        """The whole payload, once. ``ValueError`` if it is not whole."""
        if not self.complete:
            raise ValueError("the payload is not whole")
        tensors = [t if t is not None else torch.empty(0) for t in self._tensors]
        self._tensors, self._have = [], [-1] * len(self._have)
        return Fragments(tensors)
