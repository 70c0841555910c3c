"""Codecs on a real pseudo-gradient: how fast, how small, how far off; and those of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halos.codec.codecs import CODECS
from halos.codec.plain import Codec
from halos.core.fragments import Fragments
from halos.core.messages import RunLocalSteps
from halos.core.samples import Lease
from halos.core.tensors import FRAGMENT_ELEMENTS
from halos.errors import UserError
from halos.runtime.prepare import prepare
from halos.specification import RunSpecification
from halos.training.model_settings import PRESETS
from halos.wire.chunks import stretches

BATCH, ROUND = 8, 8  # samples a step, steps of the round whose change is looked at
LEAST_S = 0.5  # that one thing is measured for
ELEMENTS = 1 << 24  # to be worked on: more than the processor's cache holds


@dataclass(frozen=True)
class Measured:
    """Speeds in MB of fp32 a second, ``encode_of_copy`` and the like as shares of a copy's."""

    name: str
    encode_mb_s: float
    decode_mb_s: float
    encode_of_copy: float
    decode_of_copy: float
    bytes_a_parameter: float
    error: float  # relative, L2
    cosine: float


def pseudo_gradient(model: str, steps: int) -> Tensor:
    """What a round of ``ROUND`` local steps changes, after ``steps`` of training.

    In one dimension; ``model`` is a preset of the built-in one, trained on the standard library's
    text. Raises ``UserError`` for one that there is not.
    """
    if model not in PRESETS:
        raise UserError(
            f"--model {model}: there is no such preset; give one of {', '.join(PRESETS)}"
        )
    document = {
        "run": {"name": "bench", "directory": Path("bench")},
        "model": {"preset": model},
        "root": {"workers": 1},
        "training": {"local_steps_total": 4 * (steps + ROUND), "batch_size": BATCH},
        "inner": {"device": "cpu"},
    }
    prepared = prepare(RunSpecification.model_validate(document))
    trainer, dataset = prepared.trainer(), prepared.identity.datasets[0]

    def change(begin: int, count: int, start: Fragments) -> Fragments:
        lease = Lease(f"{begin}", dataset, 0, ((begin, begin + count * BATCH),), begin)
        done = trainer.run(RunLocalSteps(lease, count, BATCH, start))
        assert isinstance(done.payload, Fragments)
        return done.payload

    moved = zip(prepared.start.tensors, change(0, steps, prepared.start).tensors, strict=True)
    trained = Fragments([a - b for a, b in moved])
    return torch.cat(change(steps * BATCH, ROUND, trained).tensors)


@dataclass(frozen=True)
class Way:
    """A codec. ``encode`` gives what ``decode`` takes, ``size`` the bytes of that."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    size: Callable[[Any], int]


class Bench:
    """Sizes and errors are of ``gradient``; speeds of more numbers like it than a cache holds."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self._many = gradient.repeat(-(-ELEMENTS // len(gradient)))[:ELEMENTS].clone()
        to = torch.empty_like(self._many)
        self.copy_mb_s = self._mb_s(lambda: to.copy_(self._many))

    def measure(self, way: Way) -> Measured:
        sent = way.encode(self.gradient)
        true, came = self.gradient.double(), way.decode(sent).reshape(-1).double()
        many = way.encode(self._many)
        there = self._mb_s(lambda: way.encode(self._many))
        back = self._mb_s(lambda: way.decode(many))
        return Measured(
            name=way.name,
            encode_mb_s=there,
            decode_mb_s=back,
            encode_of_copy=there / self.copy_mb_s,
            decode_of_copy=back / self.copy_mb_s,
            bytes_a_parameter=way.size(sent) / len(true),
            error=float((true - came).norm() / true.norm()),
            cosine=float(torch.dot(true, came) / (true.norm() * came.norm())),
        )

    def _mb_s(self, work: Callable[[], object]) -> float:
        """The fastest of several times, after one that is not counted."""
        work()
        fastest, until = float("inf"), time.perf_counter() + LEAST_S
        while time.perf_counter() < until:
            began = time.perf_counter()
            work()
            fastest = min(fastest, time.perf_counter() - began)
        return self._many.nbytes / fastest / 1e6


def ours() -> Iterator[Way]:
    """As the wire uses them."""
    for codec in CODECS.values():
        yield _in_chunks(codec)


def _in_chunks(codec: Codec) -> Way:
    outs: dict[int, Tensor] = {}  # received into memory that is there

    def encode(values: Tensor) -> tuple[int, list[bytes]]:
        chunks = _chunks(len(values), codec)
        return len(values), [bytes(codec.encode(values[chunk])) for chunk in chunks]

    def decode(sent: tuple[int, list[bytes]]) -> Tensor:
        elements, chunks = sent
        out = outs.setdefault(elements, torch.empty(elements))
        for chunk, data in zip(_chunks(elements, codec), chunks, strict=True):
            codec.decode(data, out[chunk])
        return out

    return Way(codec.name, encode, decode, lambda sent: sum(map(len, sent[1])))


def _chunks(elements: int, codec: Codec) -> Iterator[slice]:
    """The elements of each chunk of each fragment."""
    for start in range(0, elements, FRAGMENT_ELEMENTS):
        for offset, count in stretches(min(FRAGMENT_ELEMENTS, elements - start), codec):
            yield slice(start + offset, start + offset + count)


# ---------------------------------------------------------------- those of others


def of_hivemind() -> Iterator[Way]:
    """Raises ``ImportError`` where it is not installed."""
    from hivemind import compression
    from hivemind.compression import CompressionInfo

    def compress(codec: Any, values: Tensor) -> Any:
        return codec.compress(values, CompressionInfo.from_tensor(values))

    for name, codec in {
        "float16": compression.Float16Compression(),
        "uniform 8 bit": compression.Uniform8BitQuantization(),
        "quantile 8 bit": compression.Quantile8BitQuantization(),
        "blockwise 8 bit": compression.BlockwiseQuantization(),
    }.items():
        yield Way(
            f"hivemind {name}",
            partial(compress, codec),
            codec.extract,
            lambda sent: len(sent.buffer),
        )


def of_bitsandbytes() -> Iterator[Way]:
    """Raises ``ImportError`` where it is not installed."""
    from bitsandbytes import functional as f

    yield Way(
        "bitsandbytes 8 bit",
        lambda values: f.quantize_blockwise(values, blocksize=256),
        lambda sent: f.dequantize_blockwise(*sent),
        lambda sent: sent[0].nbytes + sent[1].absmax.nbytes,
    )
    yield Way(
        "bitsandbytes 4 bit",
        lambda values: f.quantize_4bit(values, blocksize=64, quant_type="nf4"),
        lambda sent: f.dequantize_4bit(*sent),
        lambda sent: sent[0].nbytes + sent[1].absmax.nbytes,
    )


WHOSE: dict[str, Callable[[], Iterator[Way]]] = {
    "halos": ours,
    "hivemind": of_hivemind,
    "bitsandbytes": of_bitsandbytes,
}
