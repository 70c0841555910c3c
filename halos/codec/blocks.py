"""Codecs that round to a few bits, with a scale for every block of elements.

Work goes piece by piece, through buffers that stay in the cache and are used again: what is slow
about rounding is not arithmetic but memory that is touched for the first time.

On the wire: the scales in bf16, then the codes, the first of those that share a byte in its lowest
bits. Levels are evenly spaced; a block that holds what is not finite comes out as NaN.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from halos.codec.plain import Encoded, check_size, flat

PIECE = 1 << 18  # elements that are worked on at a time
SMALLEST = 2.0**-110  # a scale below it is 0: its inverse would not be finite


class _Workspace(threading.local):
    """Buffers of one thread, made when they are first needed."""

    def __init__(self) -> None:
        self.work = torch.empty(PIECE)
        self.codes = torch.empty(PIECE, dtype=torch.int8)
        self.index = torch.empty(PIECE, dtype=torch.int32)


WORKSPACE = _Workspace()


class Blocks(ABC):
    """``bits`` a number, in blocks of ``block`` elements.

    ``block`` is a multiple of 8 that divides ``PIECE``.
    """

    bits: int
    block: int

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def _quantize(self, rows: Tensor, work: Tensor) -> Tensor:
        """Write each row's codes into ``work``, as floats; return its scale, in bf16.

        Codes that share a byte are from 0 on.
        """

    @abstractmethod
    def _pack(self, codes: Tensor, out: Tensor) -> None:
        """``codes``: one a byte; ``out``: bytes, as many as they take."""

    @abstractmethod
    def _unpack(self, data: np.ndarray, elements: int) -> Tensor:
        """The levels of the codes in ``data``, as int8, in a buffer of the workspace."""

    def size(self, elements: int) -> int:
        return 2 * self._blocks(elements) + -(-elements * self.bits // 8)

    def fits(self, size: int, elements: int) -> bool:
        return size == self.size(elements)

    def encode(self, values: Tensor) -> Encoded:
        """Raises nothing: what is not finite arrives as NaN, for the receiver to refuse."""
        numbers = flat(values)
        elements = len(numbers)
        data = bytearray(self.size(elements))
        if not elements:
            return data
        scales = torch.frombuffer(data, dtype=torch.bfloat16, count=self._blocks(elements))
        codes = torch.frombuffer(data, dtype=torch.uint8, offset=2 * len(scales))
        whole = elements // self.block * self.block
        for start in range(0, whole, PIECE):
            self._encode(numbers, start, min(start + PIECE, whole), scales, codes)
        if whole < elements:
            self._encode_rest(numbers[whole:], scales, codes[whole * self.bits // 8 :])
        return data

    def decode(self, data: Encoded, out: Tensor) -> None:
        check_size(self, data, out)
        numbers = flat(out)
        elements, blocks = len(numbers), self._blocks(len(numbers))
        if not elements:
            return
        halves = np.frombuffer(data, "<u2", count=blocks).astype(np.uint32)
        scales = torch.from_numpy((halves << 16).view(np.float32))
        codes = np.frombuffer(data, np.uint8, offset=2 * blocks)
        whole = elements // self.block * self.block
        for start in range(0, whole, PIECE):
            end = min(start + PIECE, whole)
            levels = self._unpack(codes[self._span(start, end)], end - start)
            part = scales[start // self.block : end // self.block]
            rows = numbers[start:end].view(-1, self.block)
            # In two steps: a product of two types would first make a copy of one of them.
            rows.copy_(levels.view(-1, self.block)).mul_(part[:, None])
        if whole < elements:
            levels = self._unpack(codes[whole * self.bits // 8 :], elements - whole)
            numbers[whole:].copy_(levels).mul_(scales[-1])

    def _encode(self, numbers: Tensor, start: int, end: int, scales: Tensor, codes: Tensor) -> None:
        rows = numbers[start:end].view(-1, self.block)
        work = WORKSPACE.work[: end - start]
        scales[start // self.block : end // self.block] = self._quantize(
            rows, work.view(-1, self.block)
        )
        bytes_ = WORKSPACE.codes[: end - start]
        self._pack(bytes_.copy_(work), codes[self._span(start, end)])

    def _encode_rest(self, numbers: Tensor, scales: Tensor, codes: Tensor) -> None:
        """The last block, if it is shorter: as if zeros followed."""
        padded = torch.zeros(self.block)
        padded[: len(numbers)] = numbers
        whole = torch.empty(self.block * self.bits // 8, dtype=torch.uint8)
        self._encode(padded, 0, self.block, scales[-1:], whole)
        codes.copy_(whole[: len(codes)])

    def _span(self, start: int, end: int) -> slice:
        """Of the bytes that elements ``start`` to ``end`` are in."""
        return slice(start * self.bits // 8, end * self.bits // 8)

    def _blocks(self, elements: int) -> int:
        return -(-elements // self.block)


def _divide(rows: Tensor, scale: Tensor, work: Tensor) -> None:
    """``work = rows / scale``, and 0 in blocks without a scale."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    torch.mul(rows, inverse[:, None], out=work)


def _as_sent(scale: Tensor) -> Tensor:
    """A scale as the receiver will have it; NaN stays NaN."""
    scale = torch.where(scale < SMALLEST, 0.0, scale)
    return torch.where(scale.isinf(), torch.nan, scale).bfloat16()


class Even(Blocks):
    """``2**bits - 1`` levels from minus to plus the block's largest magnitude; 0 is one of them.

    No element is off by more than half a step, ``largest / (2**bits - 2)``, and 1/256 of its size
    more for the rounding of the scale.
    """

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.block = bits, block
        self._top = 2 ** (bits - 1) - 1

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def _quantize(self, rows: Tensor, work: Tensor) -> Tensor:
        largest = torch.amax(torch.abs(rows, out=work), 1)
        sent = _as_sent(largest / self._top)
        _divide(rows, sent.float(), work)
        work.round_().clamp_(-self._top, self._top)
        if self.bits < 8:
            work.add_(float(self._top + 1))
        return sent

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.view(torch.int8).copy_(codes)
            return
        pairs = codes.view(torch.int16)
        words = WORKSPACE.index.view(torch.int16)[: len(pairs)]
        torch.bitwise_right_shift(pairs, 4, out=words).bitwise_or_(pairs)
        out.copy_(words)  # a byte keeps the lowest eight bits

    def _unpack(self, data: np.ndarray, elements: int) -> Tensor:
        if self.bits == 8:
            levels = WORKSPACE.codes[:elements]
            levels.numpy().view(np.uint8)[:] = data
            return levels
        return _looked_up(NIBBLES, data, elements)


class Quarters(Blocks):
    """Two bits: -3, -1, 1 and 3 times a scale, which is the best for the levels chosen.

    The levels are those of a normal distribution with the block's mean magnitude; the scale then
    minimises the squared error, so that what arrives is never farther off than nothing would be.
    """

    name = "int2"
    bits = 2
    TO_SCALE = 0.6241  # of a normal distribution: half the best spacing of four levels (Max 1960)

    def __init__(self, block: int) -> None:
        self.block = block

    def _quantize(self, rows: Tensor, work: Tensor) -> Tensor:
        spread = torch.mean(torch.abs(rows, out=work), 1) * self.TO_SCALE
        _divide(rows, 2 * torch.where(spread < SMALLEST, 0.0, spread), work)
        work.floor_().clamp_(-2, 1).mul_(2.0).add_(1.0)  # -3, -1, 1, 3
        fits = torch.linalg.vecdot(rows, work) / torch.linalg.vecdot(work, work)
        work.add_(3.0).mul_(0.5)
        return _as_sent(fits)

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        fours = codes.view(torch.int32)
        twos = WORKSPACE.index[: len(fours)]
        torch.bitwise_right_shift(fours, 6, out=twos).bitwise_or_(fours)
        out.copy_(torch.bitwise_right_shift(twos, 12, out=fours).bitwise_or_(twos))

    def _unpack(self, data: np.ndarray, elements: int) -> Tensor:
        return _looked_up(PAIRS_OF_BITS, data, elements)


def _looked_up(table: Tensor, data: np.ndarray, elements: int) -> Tensor:
    """The levels of the codes in each byte, by a table of what 256 bytes stand for."""
    index = WORKSPACE.index[: len(data)]
    index.numpy()[:] = data
    words = WORKSPACE.codes.view(table.dtype)[: len(data)]
    return torch.index_select(table, 0, index, out=words).view(torch.int8)[:elements]


def _table(bits: int, level: list[int], word: torch.dtype) -> Tensor:
    mask = 2**bits - 1
    found = [[level[byte >> shift & mask] for shift in range(0, 8, bits)] for byte in range(256)]
    return torch.tensor(found, dtype=torch.int8).view(word).view(-1)


NIBBLES = _table(4, [code - 8 for code in range(16)], torch.int16)
PAIRS_OF_BITS = _table(2, [-3, -1, 1, 3], torch.int32)
