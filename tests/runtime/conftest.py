"""Small real runs: a tiny model on the sources of two modules of the standard library."""

from __future__ import annotations

import argparse
import calendar
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halos.runtime.prepare import Prepared, prepare
from halos.specification import RunSpecification

Spec = Callable[..., RunSpecification]
Prepare = Callable[..., Prepared]


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[Path, Path]:
    """Token files (train, validation) of bytes."""
    files = tmp_path / "train.bin", tmp_path / "validation.bin"
    for file, module in zip(files, (argparse, calendar), strict=True):
        file.write_bytes(inspect.getsource(module).encode()[:20_000])
    return files


@pytest.fixture
def specification(tmp_path: Path, tokens: tuple[Path, Path]) -> Spec:
    """A specification of two regions with three workers; sections given replace these."""

    def build(**sections: Any) -> RunSpecification:
        document = {
            "run": {"name": "small", "directory": tmp_path / "run"},
            "data": {
                "train": tokens[0],
                "validation": tokens[1],
                "dtype": "uint8",
                "vocab_size": 256,
                "sequence_length": 16,
            },
            "model": {"layers": 1, "heads": 2, "width": 16},
            "inner": {"device": "cpu"},
            "training": {"local_steps_total": 90, "batch_size": 2},
            "sync": {"local_steps": 2, "accumulation": 2},
            "regions": [{"name": "us", "workers": [1.0, 0.5]}, {"name": "eu", "workers": [0.8]}],
            "checkpoint": {"every_s": 3600},
            "evaluation": {"every_s": 3600},
        }
        return RunSpecification.model_validate(document | sections)

    return build


@pytest.fixture
def prepared(specification: Spec) -> Prepare:
    return lambda **sections: prepare(specification(**sections))
