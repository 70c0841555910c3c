"""Codecs that keep one number an element: fp32 as it is, and bf16, half the bytes.

Both work on stretches of a fragment, straight from and into its memory: no copy of a whole model
is made. Bytes are little-endian.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

if sys.byteorder != "little":
    raise ImportError("halos's wire is little-endian, and this machine is not")


class Codec(Protocol):
    """``name`` is what manifests say; encoded size is a function of the element count alone."""

    name: str

    def size(self, elements: int) -> int:
        """Bytes that ``elements`` of them are encoded in."""
        ...

    def encode(self, values: Tensor) -> bytes:
        """``values``: fp32, of one dimension, contiguous, on the CPU."""
        ...

    def decode(self, data: bytes, out: Tensor) -> None:
        """Write into ``out``, which is as ``values`` was. ``ValueError`` if the size is wrong."""
        ...


class Fp32:
    name = "fp32"

    def size(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor) -> bytes:
        return values.numpy().tobytes()

    def decode(self, data: bytes, out: Tensor) -> None:
        _check(self, data, out)
        if data:
            out.numpy().view("uint8")[:] = memoryview(data)


class Bf16:
    """Rounds to nearest, ties to even; infinities and NaN stay what they are."""

    name = "bf16"

    def size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor) -> bytes:
        return values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()

    def decode(self, data: bytes, out: Tensor) -> None:
        _check(self, data, out)
        if data:
            out.copy_(torch.frombuffer(bytearray(data), dtype=torch.bfloat16))


def _check(codec: Codec, data: bytes, out: Tensor) -> None:
    if len(data) != codec.size(out.numel()):
        raise ValueError(
            f"{len(data)} bytes are not {out.numel()} elements as {codec.name}, which is "
            f"{codec.size(out.numel())}"
        )


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16())}
