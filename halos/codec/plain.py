"""What a codec is, and those that keep one number an element: fp32 as it is, bf16 and fp16.

All work on stretches of a fragment, straight from and into its memory: nothing of the size of a
model is made. On the wire bytes are little-endian.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Encoded = bytes | bytearray | memoryview


class Codec(Protocol):
    """Turns stretches of a fragment into bytes, and back into fp32.

    What is not finite arrives as something that is not finite: the receiver refuses it. Any number
    of threads may use a codec at once.
    """

    @property
    def name(self) -> str:
        """What manifests and specifications call it."""
        ...

    def size(self, elements: int) -> int:
        """Bytes that so many elements are encoded in, at most."""
        ...

    def fits(self, size: int, elements: int) -> bool:
        """Whether so many elements may be encoded in ``size`` bytes."""
        ...

    def encode(self, values: Tensor) -> Encoded:
        """``values``: contiguous, on the CPU; fp32, or any type that is exact in it.

        The bytes may be a view of the tensor's memory, and change with it.
        """
        ...

    def decode(self, data: Encoded, out: Tensor) -> None:
        """Write into ``out``: fp32, contiguous, on the CPU.

        Raises ``ValueError`` for what cannot be of so many elements, having taken no memory that
        they do not justify.
        """
        ...


class Fixed:
    """Of codecs whose size follows from the elements alone: ``width`` bytes each."""

    width: int

    def size(self, elements: int) -> int:
        return self.width * elements

    def fits(self, size: int, elements: int) -> bool:
        return size == self.size(elements)


class Fp32(Fixed):
    name, width = "fp32", 4

    def encode(self, values: Tensor) -> Encoded:
        return _bytes_of(flat(values).numpy().astype("<f4", copy=False))

    def decode(self, data: Encoded, out: Tensor) -> None:
        check_size(self, data, out)
        flat(out).numpy()[:] = np.frombuffer(data, "<f4")


class Half(Fixed):
    """Two bytes a number, in a type of torch's: rounds to nearest, ties to even.

    Infinities and NaN stay what they are. fp16 has three more bits than bf16, of numbers up to
    65,504; larger ones become infinite.
    """

    width = 2

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype

    def encode(self, values: Tensor) -> Encoded:
        rounded = flat(values).to(self._dtype).view(torch.int16)
        return _bytes_of(rounded.numpy().astype("<i2", copy=False))

    def decode(self, data: Encoded, out: Tensor) -> None:
        check_size(self, data, out)
        # Of its own, since torch wants what may be written to; numpy would convert it far slower.
        halves = torch.from_numpy(np.frombuffer(data, "<i2").astype(np.int16))
        flat(out).copy_(halves.view(self._dtype))


def check_size(codec: Codec, data: Encoded, out: Tensor) -> None:
    """Raises ``ValueError`` unless ``data`` is as long as ``out`` is when encoded."""
    if len(data) != codec.size(out.numel()):
        raise ValueError(
            f"{len(data)} bytes are not {out.numel()} elements in {codec.name}, which take "
            f"{codec.size(out.numel())}"
        )


def flat(tensor: Tensor) -> Tensor:
    """The same memory in one dimension; a copy only of what is not fp32."""
    return tensor.detach().to(torch.float32).view(-1)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data
