from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halos.core.fragments import Fragments
from halos.core.messages import RunLocalSteps
from halos.core.samples import Lease
from halos.training.data import Dataset, DataSettings, SampleOrder, open_dataset
from halos.training.inner import LocalTrainer
from halos.training.model import ModelSettings, build_model
from halos.training.optimizer import InnerSettings
from halos.training.parameters import layout_of

VOCABULARY = 32
LENGTH = 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, tokens: object, dtype: str = "uint16") -> Path:
        path = tmp_path / name
        np.asarray(tokens).astype(dtype).tofile(path)
        return path

    return write


@pytest.fixture
def data_settings(write: Callable[..., Path]) -> DataSettings:
    random = np.random.default_rng(0)
    return DataSettings(
        train=write("some.bin", random.integers(0, VOCABULARY, 1 + 50 * LENGTH)),
        validation=write("held-out.bin", random.integers(0, VOCABULARY, 1 + 10 * LENGTH)),
        dtype="uint16",
        vocab_size=VOCABULARY,
        sequence_length=LENGTH,
    )


@pytest.fixture
def dataset(data_settings: DataSettings) -> Dataset:
    return open_dataset(data_settings)


@pytest.fixture
def sizes() -> ModelSettings:
    sizes = ModelSettings(layers=2, heads=2, width=16, ffn_width=32)
    return sizes.for_data(VOCABULARY, LENGTH)


@pytest.fixture
def trainer(dataset: Dataset, sizes: ModelSettings) -> Callable[..., LocalTrainer]:
    def trainer(**inner: object) -> LocalTrainer:
        settings = {"warmup_iterations": 2, "total_iterations": 20, "device": "cpu", **inner}
        model = build_model(sizes, seed=1)
        return LocalTrainer(
            model,
            layout_of(model),
            dataset,
            SampleOrder(7, dataset.samples),
            InnerSettings.model_validate(settings),
            global_batch=8,
        )

    return trainer


def job(start: int, end: int, payload: Fragments, batch: int = 4, **lease: int) -> RunLocalSteps:
    ranges = ((start, end),)
    origin, progress = lease.get("origin", 0), lease.get("progress", start)
    steps = -(-(end - start) // batch)
    return RunLocalSteps(
        Lease(f"{start}-{end}", "some", origin, ranges, progress), steps, batch, payload
    )


@pytest.fixture(name="job")
def _job() -> Callable[..., RunLocalSteps]:
    return job
