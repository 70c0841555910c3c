"""The largest elements alone, and where they are."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from halos.codec.blocks import PIECE, WORKSPACE, Even
from halos.codec.plain import Encoded, flat

SHARE = 32  # one element of so many is kept
STRIDE = 61  # every such element is looked at for the threshold; prime, so that no row is favoured
LONGEST = 255  # a gap of a byte; this one says that more follows
HEADER = struct.Struct("<II")  # elements kept, bytes of gaps


class TopK:
    """About one element of ``SHARE`` is kept: those above a threshold; the others arrive as 0.

    The threshold is that of a sample, taken anew in each stretch instead of sorting it (as a
    threshold that is used again does, Gupta et al., arXiv 2010.08899, without a state that both
    ends of a transfer would have to share). Kept elements are rounded to 4 bits in blocks of 64;
    their distances take a byte each.

    What is not finite is kept, and makes its block NaN.
    """

    name = "topk"
    VALUES = Even(4, 64)

    def size(self, elements: int) -> int:
        """At most so many bytes."""
        kept = self._most(elements)
        return HEADER.size + kept + elements // LONGEST + self.VALUES.size(kept)

    def fits(self, size: int, elements: int) -> bool:
        return HEADER.size <= size <= self.size(elements)

    def encode(self, values: Tensor) -> Encoded:
        numbers = flat(values)
        places = self._places(numbers)
        gaps = _gaps(places)
        kept = self.VALUES.encode(numbers[places])
        return b"".join((HEADER.pack(len(places), len(gaps)), gaps.tobytes(), kept))

    def decode(self, data: Encoded, out: Tensor) -> None:
        """Raises ``ValueError`` for what cannot be of so many elements."""
        numbers, view = flat(out), memoryview(data).cast("B")
        if not self.fits(len(view), len(numbers)):
            raise ValueError(f"{len(view)} bytes are not {len(numbers)} elements in {self.name}")
        count, size = HEADER.unpack_from(view)
        if count > self._most(len(numbers)) or HEADER.size + size > len(view):
            raise ValueError(f"{count} of {len(numbers)} elements are said to be in {size} bytes")
        places = _placed(np.frombuffer(view, np.uint8, size, HEADER.size))
        if len(places) != count or (count and places[-1] >= len(numbers)):
            raise ValueError(f"{count} elements are not at the places that are given")
        kept = torch.empty(count)
        self.VALUES.decode(view[HEADER.size + size :], kept)
        numbers.zero_()
        numbers[torch.from_numpy(places)] = kept

    def _most(self, elements: int) -> int:
        """Elements kept at most: a sample's threshold may let more through."""
        return -(-elements * 5 // (4 * SHARE))

    def _places(self, numbers: Tensor) -> Tensor:
        """Of the elements that are kept, in order."""
        if not len(numbers):
            return torch.empty(0, dtype=torch.int64)
        sample = numbers[::STRIDE].abs()
        wanted = max(1, len(sample) // SHARE)
        threshold = torch.topk(sample, wanted, sorted=False).values.amin()
        found = [
            start + _above(numbers[start : start + PIECE], threshold).nonzero().view(-1)
            for start in range(0, len(numbers), PIECE)
        ]
        places, most = torch.cat(found), self._most(len(numbers))
        if len(places) > most:
            sizes = numbers[places].abs().nan_to_num_(torch.inf)
            places = places[torch.topk(sizes, most, sorted=False).indices].sort().values
        return places


def _above(numbers: Tensor, threshold: Tensor) -> Tensor:
    """Which are at or above it and not 0, or no number at all."""
    sizes = torch.abs(numbers, out=WORKSPACE.work[: len(numbers)])
    return ~(sizes < threshold) & (sizes != 0)


def _gaps(places: Tensor) -> np.ndarray:
    """How many elements are passed over before each place, in bytes."""
    skipped = np.diff(places.numpy(), prepend=-1) - 1
    long = skipped // LONGEST
    gaps = np.full(len(skipped) + int(long.sum()), LONGEST, np.uint8)
    gaps[np.arange(len(skipped)) + np.cumsum(long)] = skipped % LONGEST
    return gaps


def _placed(gaps: np.ndarray) -> np.ndarray:
    """The inverse of :func:`_gaps`."""
    is_place = gaps != LONGEST
    passed = np.cumsum(gaps.astype(np.int64) + is_place)
    places: np.ndarray = passed[is_place] - 1
    return places
