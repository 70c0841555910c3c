"""Token files as a training set: samples by number, and a seeded order of them for each epoch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor

from halos.core.settings import Settings
from halos.errors import UserError
from halos.training.corpus import Progress, content_hash, standard_library

BUILT_IN, OWN = "python-stdlib", "own"
NO_DATA = (
    '[data] dataset: is "own", which only the training loops have; evaluate in yours, or name data '
    "that halos can read"
)
TokenType = Literal["uint8", "uint16", "uint32"]
Indices = Sequence[int] | npt.NDArray[np.int64]


class DataSettings(Settings):
    """What to train on: the built-in text, token files of one's own, or what a loop brings.

    A token file is a flat array of little-endian ``dtype``. With files of one's own all of
    ``train``, ``validation``, ``dtype`` and ``vocab_size`` are needed, and ``dataset`` is the name
    that leases carry, by default that of the training file. ``sequence_length`` in tokens.

    With ``dataset = "own"`` the run only leases numbers below ``samples``, and each worker's loop
    brings the data set, called ``name``: machines with the same name and number have the same one.
    A sample counts as ``sequence_length`` tokens, by default as one.
    """

    train: Path | None = None
    validation: Path | None = None
    dataset: str = Field(default="", validate_default=True)
    dtype: TokenType = "uint8"
    vocab_size: int = Field(default=256, ge=2, le=2**32)
    sequence_length: int = Field(default=64, ge=1)
    samples: int | None = Field(default=None, ge=1)
    name: str | None = Field(default=None, min_length=1)

    @property
    def own(self) -> bool:
        """Whether the loop that trains brings the samples."""
        return self.dataset == OWN and self.train is None

    @model_validator(mode="before")
    @classmethod
    def _of_a_loop(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = given.get("dataset") == OWN and not given.get("train")
        for field in ("samples", "name"):
            if own and given.get(field) is None:
                raise ValueError(f'{field}: is missing, and dataset = "own" needs it')
            if not own and given.get(field) is not None:
                raise ValueError(f'{field}: goes with dataset = "own"; remove it, or set that')
        return {"sequence_length": 1, **given} if own else given

    @model_validator(mode="before")
    @classmethod
    def _all_or_none(cls, given: Any) -> Any:
        if isinstance(given, dict) and (given.get("train") or given.get("validation")):
            for name in ("train", "validation", "dtype", "vocab_size"):
                if given.get(name) is None:
                    raise ValueError(f"{name}: is missing, and token files of your own need it")
        return given

    @field_validator("dataset")
    @classmethod
    def _name(cls, dataset: str, info: ValidationInfo) -> str:
        train: Path | None = info.data.get("train")
        if train is not None:
            return dataset or train.stem
        if dataset not in ("", BUILT_IN, OWN):
            raise ValueError(
                f"there is no data set {dataset!r}: {BUILT_IN} is built in; for token files of "
                f"your own set train and validation, for data that your loop brings {OWN!r}"
            )
        return dataset or BUILT_IN

    @model_validator(mode="after")
    def _bytes(self) -> DataSettings:
        if self.train is None and not self.own and (self.dtype, self.vocab_size) != ("uint8", 256):
            raise ValueError(f"dtype and vocab_size: {BUILT_IN} is uint8 with 256 values")
        return self


class TokenFile:
    """Sequences of ``length`` tokens and their targets, which are the tokens one further."""

    def __init__(self, path: Path, field: str, settings: DataSettings) -> None:
        """``field`` names the file in errors. Raises ``UserError`` if it cannot be used."""
        self.path, self.field, self.length = path, field, settings.sequence_length
        self.vocab_size = settings.vocab_size
        dtype = np.dtype(settings.dtype).newbyteorder("<")
        self._any_fits = self.vocab_size > np.iinfo(dtype).max
        try:
            size = path.stat().st_size
            tokens, rest = divmod(size, dtype.itemsize)
            if tokens <= self.length:
                raise UserError(
                    f"{field} is {path}, which holds {tokens} tokens: a sample needs "
                    f"data.sequence_length + 1 = {self.length + 1}"
                )
            if rest:
                raise UserError(
                    f"{field} is {path}, whose {size} bytes are no whole number of "
                    f"{settings.dtype} tokens: check data.dtype"
                )
            self.tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
        except OSError as error:
            raise UserError(f"{field} is {path}, which cannot be read: {error.strerror}") from None
        self.samples = (tokens - 1) // self.length
        self.batch([0, self.samples - 1])  # a wrong dtype or vocabulary shows at once, mostly

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [n, T] each, of samples 0 <= index < ``samples``."""
        starts = np.asarray(indices, dtype=np.int64) * self.length
        rows = self.tokens[starts[:, None] + np.arange(self.length + 1)].astype(np.int64)
        self.check(rows)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def check(self, tokens: npt.NDArray[np.int64]) -> None:
        """Raises ``UserError`` if one is outside the vocabulary."""
        if not self._any_fits and tokens.size and tokens.max() >= self.vocab_size:
            raise UserError(
                f"{self.field} is {self.path}, which holds token {tokens.max()}: with "
                f"data.vocab_size {self.vocab_size} tokens are below that; check it and data.dtype"
            )


class Dataset:
    """A training set and what is held out of it. May be read from several threads at once."""

    def __init__(self, name: str, train: TokenFile, validation: TokenFile, dtype: str) -> None:
        self.name = name
        self.train, self.validation = train, validation
        self.dtype = dtype

    @property
    def vocab_size(self) -> int:
        return self.train.vocab_size

    @property
    def sequence_length(self) -> int:
        return self.train.length

    @property
    def samples(self) -> int:
        """Number of training samples in an epoch."""
        return self.train.samples

    @cached_property
    def content_hash(self) -> str:
        """Equal for equal training tokens; what machines compare when they join."""
        return content_hash(self.train.path, self.dtype)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Training samples: tokens and targets, int64 [n, T] each."""
        return self.train.batch(indices)

    def validation_batches(
        self, batch_size: int, limit: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Held-out samples, ``batch_size`` at a time: all, or ``limit`` evenly spread over all."""
        count = self.validation.samples if limit is None else min(limit, self.validation.samples)
        chosen = np.arange(count) * self.validation.samples // max(1, count)
        for start in range(0, count, batch_size):
            yield self.validation.batch(chosen[start : start + batch_size])


def open_dataset(settings: DataSettings, progress: Progress | None = None) -> Dataset:
    """Open the files, building the built-in text first if need be (``progress`` hears of that).

    Raises ``UserError`` for a file that is missing, too short or of another type, and for data
    that only a loop brings.
    """
    if settings.own:
        raise UserError(NO_DATA)
    train, validation = settings.train, settings.validation
    if train is None or validation is None:
        train, validation = standard_library(progress)
    return Dataset(
        settings.dataset,
        TokenFile(train.expanduser(), "data.train", settings),
        TokenFile(validation.expanduser(), "data.validation", settings),
        settings.dtype,
    )


class SampleOrder:
    """Which sample stands at which position of an endless sequence of epochs.

    Each epoch is a permutation of all samples drawn for (``seed``, epoch) alone, so that machines
    agree on it without talking. Drawn when first asked for: about 0.1 us a sample, 4 bytes each.
    Threads may share one.
    """

    KEPT = 2  # leases straddle an epoch's end

    def __init__(self, seed: int, samples: int) -> None:
        """``seed`` from 0 below 2**64, ``samples`` from 1."""
        self.seed, self.samples = seed, samples
        self._lock = threading.Lock()
        self._epochs: dict[int, npt.NDArray[np.integer[Any]]] = {}

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, index of the sample) at ``position``."""
        epoch, place = divmod(position, self.samples)
        return epoch, int(self._permutation(epoch)[place])

    def indices(self, positions: Indices) -> npt.NDArray[np.int64]:
        """Indices of the samples at ``positions``, in their order."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), self.samples)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            found[chosen] = self._permutation(int(epoch))[places[chosen]]
        return found

    def _permutation(self, epoch: int) -> npt.NDArray[np.integer[Any]]:
        with self._lock:
            known = self._epochs.pop(epoch, None)
            if known is None:
                # Raw bits and a stable sort, for numpy may change its permutations from version
                # to version, and then two machines would train on the same sample.
                key = np.array([self.seed, epoch], dtype=np.uint64)
                bits = np.random.Philox(key=key).random_raw(self.samples)
                small = np.uint32 if self.samples <= 2**32 else np.int64
                known = np.argsort(bits, kind="stable").astype(small)
            self._epochs[epoch] = known
            while len(self._epochs) > self.KEPT:
                self._epochs.pop(next(iter(self._epochs)))
            return known
