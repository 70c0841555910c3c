"""Codecs that keep one number an element: fp32 as it is, and bf16, half the bytes.

Both work on stretches of a fragment, straight from and into its memory: nothing of the size of a
model is made. On the wire bytes are little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Encoded = bytes | memoryview


class Codec(Protocol):
    """Turns tensors into bytes whose number follows from that of the elements alone."""

    @property
    def name(self) -> str:
        """What manifests and specifications call it."""
        ...

    def size(self, elements: int) -> int:
        """Bytes that so many elements are encoded in."""
        ...

    def encode(self, values: Tensor) -> Encoded:
        """``values``: contiguous, on the CPU; fp32, or any type that is exact in it.

        The bytes may be a view of the tensor's memory, and change with it.
        """
        ...

    def decode(self, data: Encoded, out: Tensor) -> None:
        """Write into ``out``: fp32, contiguous, on the CPU. ``ValueError`` if sizes differ."""
        ...


class Fp32:
    name = "fp32"

    def size(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor) -> Encoded:
        return _bytes_of(_flat(values).numpy().astype("<f4", copy=False))

    def decode(self, data: Encoded, out: Tensor) -> None:
        check_size(self, data, out)
        _flat(out).numpy()[:] = np.frombuffer(data, "<f4")


class Bf16:
    """Rounds to nearest, ties to even. Infinities and NaN stay what they are."""

    name = "bf16"

    def size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor) -> Encoded:
        rounded = _flat(values).to(torch.bfloat16).view(torch.int16)
        return _bytes_of(rounded.numpy().astype("<i2", copy=False))

    def decode(self, data: Encoded, out: Tensor) -> None:
        check_size(self, data, out)
        bits = _flat(out).numpy().view(np.uint32)
        np.left_shift(np.frombuffer(data, "<u2"), 16, out=bits, dtype=np.uint32)


def check_size(codec: Codec, data: Encoded, out: Tensor) -> None:
    """Raises ``ValueError`` unless ``data`` is as long as ``out`` is when encoded."""
    if len(data) != codec.size(out.numel()):
        raise ValueError(
            f"{len(data)} bytes are not {out.numel()} elements in {codec.name}, which take "
            f"{codec.size(out.numel())}"
        )


def _flat(tensor: Tensor) -> Tensor:
    """The same memory in one dimension; a copy only of what is not fp32."""
    return tensor.detach().to(torch.float32).view(-1)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16())}
