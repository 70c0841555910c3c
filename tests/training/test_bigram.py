from __future__ import annotations

from collections.abc import Callable
from math import log
from pathlib import Path

import pytest

from halos.training import bigram
from halos.training.data import Dataset, DataSettings, open_dataset


@pytest.fixture
def tiny(write: Callable[..., Path]) -> Callable[[int], Dataset]:
    def tiny(vocab_size: int) -> Dataset:
        # training pairs: 00 01 11 10 01; held-out pairs: 01 12 20
        return open_dataset(
            DataSettings(
                train=write("train.bin", [0, 0, 1, 1, 0, 1]),
                validation=write("validation.bin", [0, 1, 2, 0]),
                dtype="uint16",
                vocab_size=vocab_size,
                sequence_length=2,
            )
        )

    return tiny


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_the_loss_is_that_of_smoothed_counts(
    tiny: Callable[[int], Dataset], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(bigram, "CHUNK", chunk)
    p01 = (2 + 0.5) / (3 + 0.5 * 3)
    p12 = (0 + 0.5) / (2 + 0.5 * 3)
    p20 = (0 + 0.5) / (0 + 0.5 * 3)
    expected = -(log(p01) + log(p12) + log(p20)) / 3
    assert bigram.bigram_loss(tiny(3), alpha=0.5) == pytest.approx(expected)


def test_pairs_of_a_large_vocabulary_are_not_counted(tiny: Callable[[int], Dataset]) -> None:
    assert bigram.bigram_loss(tiny(4097)) is None


def test_the_standard_library_sets_the_known_bar() -> None:
    assert bigram.bigram_loss(open_dataset(DataSettings())) == pytest.approx(2.45, abs=0.1)
