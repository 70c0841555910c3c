from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from halos.errors import UserError
from halos.training.data import Dataset, DataSettings, SampleOrder, open_dataset

Write = Callable[..., Path]


def counting(write: Write, tokens: int, dtype: str = "uint16", **more: object) -> Dataset:
    """A data set of the tokens 0, 1, 2, ..."""
    path = write("counting.bin", np.arange(tokens), dtype)
    sizes = {"dtype": dtype, "vocab_size": tokens, "sequence_length": 4, **more}
    return open_dataset(DataSettings.model_validate({"train": path, "validation": path, **sizes}))


@pytest.mark.parametrize(("tokens", "samples"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_samples_follow_each_other_and_share_one_token(
    write: Write, tokens: int, samples: int
) -> None:
    dataset = counting(write, tokens)
    assert dataset.samples == samples
    x, y = dataset.batch([samples - 1, 0])
    assert x[1].tolist() == [0, 1, 2, 3]
    assert x[0].tolist() == list(range(4 * samples - 4, 4 * samples))
    assert (y - x).unique().tolist() == [1]
    assert str(x.dtype) == str(y.dtype) == "torch.int64"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_every_type_of_token_is_read(write: Write, dtype: str) -> None:
    x, y = counting(write, 13, dtype).batch(np.array([2]))
    assert (x.tolist(), y.tolist()) == ([[8, 9, 10, 11]], [[9, 10, 11, 12]])


def test_validation_covers_all_or_is_spread_evenly(write: Write) -> None:
    dataset = counting(write, 41)

    def firsts(batch: int, limit: int | None) -> list[list[int]]:
        batches = dataset.validation_batches(batch, limit)
        return [(x[:, 0] // 4).tolist() for x, _ in batches]

    assert firsts(4, None) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert firsts(4, 99) == firsts(4, None)
    assert firsts(2, 5) == [[0, 2], [4, 6], [8]]
    assert firsts(2, 0) == []


def test_the_built_in_text_needs_no_settings() -> None:
    dataset = open_dataset(DataSettings())
    assert (dataset.name, dataset.vocab_size, dataset.sequence_length) == ("python-stdlib", 256, 64)
    assert dataset.samples > 50_000
    assert len(dataset.content_hash) == 64


def test_a_data_set_is_called_after_its_file_or_as_it_says(data_settings: DataSettings) -> None:
    assert data_settings.dataset == "some"
    assert DataSettings.model_validate(data_settings.model_dump()) == data_settings
    named = {**data_settings.model_dump(), "dataset": "mine"}
    assert open_dataset(DataSettings.model_validate(named)).name == "mine"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": "pile"}, "there is no data set 'pile': python-stdlib is built in"),
        ({"train": "a.bin"}, "validation: is missing"),
        ({"validation": "a.bin"}, "train: is missing"),
        ({"train": "a", "validation": "b", "vocab_size": 9}, "dtype: is missing"),
        ({"train": "a", "validation": "b", "dtype": "uint8"}, "vocab_size: is missing"),
        ({"train": "a", "validation": "b", "vocab_size": 9, "dtype": "int8"}, "'uint16' or"),
        ({"vocab_size": 100}, "python-stdlib is uint8 with 256 values"),
        ({"sequence_length": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_name_no_data_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        DataSettings.model_validate(given)
    assert says in str(error.value)


def test_files_that_cannot_be_trained_on_are_refused_with_the_remedy(
    write: Write, tmp_path: Path
) -> None:
    good, short = write("good.bin", range(9)), write("short.bin", range(4))
    odd, large = write("odd.bin", range(15), "uint8"), write("large.bin", [*range(8), 12])

    def opened(train: Path, validation: Path = good) -> Dataset:
        files = {"train": train, "validation": validation}
        sizes = {"dtype": "uint16", "vocab_size": 9, "sequence_length": 4}
        return open_dataset(DataSettings.model_validate({**files, **sizes}))

    with pytest.raises(UserError, match=r"data\.train is .*gone\.bin, which cannot be read: No"):
        opened(tmp_path / "gone.bin")
    with pytest.raises(UserError, match=r"data\.validation is .*short\.bin, which holds 4 tokens"):
        opened(good, short)
    with pytest.raises(UserError, match=r"15 bytes are no whole number of uint16"):
        opened(odd)
    with pytest.raises(UserError, match=r"holds token 12: with data\.vocab_size 9"):
        opened(large)
    with pytest.raises(UserError, match=r"data\.train is .*, which cannot be read"):
        opened(tmp_path)


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(write: Write) -> None:
    tokens = np.zeros(41)
    tokens[21] = 7
    path = write("some.bin", tokens)
    sizes = {"dtype": "uint16", "vocab_size": 7, "sequence_length": 4}
    dataset = open_dataset(
        DataSettings.model_validate({"train": path, "validation": path, **sizes})
    )
    dataset.batch([4, 6])
    with pytest.raises(UserError, match="holds token 7"):
        dataset.batch([4, 5])


@settings(deadline=None)
@given(seed=st.integers(0, 2**64 - 1), samples=st.integers(1, 200), epoch=st.integers(0, 50))
def test_an_epoch_is_a_permutation(seed: int, samples: int, epoch: int) -> None:
    order = SampleOrder(seed, samples)
    positions = range(epoch * samples, (epoch + 1) * samples)
    located = [order.locate(position) for position in positions]
    assert {e for e, _ in located} == {epoch}
    assert sorted(index for _, index in located) == list(range(samples))


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), max_size=30))
def test_many_positions_are_located_as_each_is(positions: list[int]) -> None:
    order = SampleOrder(3, 50)
    assert order.indices(positions).tolist() == [order.locate(p)[1] for p in positions]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return SampleOrder(seed, 100).indices(range(100 * number, 100 * number + 100)).tolist()

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 1) != epoch(2, 1)
    assert epoch(1, 0) != list(range(100))


def test_the_order_never_changes_between_versions() -> None:
    assert SampleOrder(42, 8).indices(range(16)).tolist() == [
        *(7, 1, 6, 4, 3, 5, 0, 2),
        *(4, 5, 3, 0, 2, 7, 1, 6),
    ]


def test_threads_share_an_order() -> None:
    order, expected = SampleOrder(5, 1000), SampleOrder(5, 1000).indices(range(4000)).tolist()
    found: dict[int, list[int]] = {}

    def read(thread: int) -> None:
        epochs = np.roll(np.arange(4), thread)
        parts = {e: order.indices(range(1000 * e, 1000 * e + 1000)).tolist() for e in epochs}
        found[thread] = [index for e in range(4) for index in parts[e]]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)
    assert len(order._epochs) <= SampleOrder.KEPT
