"""The real command, as a user starts it."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Halos = Callable[..., subprocess.CompletedProcess[str]]
PATIENCE_S, LOOK_S = 500, 0.05

SMALL = """
[run]
name = "small"

[data]
train = "train.bin"
validation = "validation.bin"
dtype = "uint8"
vocab_size = 256
sequence_length = 16

[model]
layers = 1
heads = 2
width = 16

[inner]
device = "cpu"

[training]
local_steps_total = 60
batch_size = 2

[sync]
local_steps = 2
accumulation = 2

[[regions]]
name = "us"
workers = [1.0, 0.5]

[[regions]]
name = "eu"
workers = 1
"""


def wait_for(condition: Callable[[], Any]) -> Any:
    """Its first true value."""
    ends, never = time.monotonic() + PATIENCE_S, threading.Event()
    while time.monotonic() < ends:
        if found := condition():
            return found
        never.wait(LOOK_S)  # the cores are for the run
    raise AssertionError("this did not come to be")


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("halos")), *arguments]


@pytest.fixture
def halos(tmp_path: Path) -> Halos:
    """Run a command to its end in the test's folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    return run


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """``run.toml`` of a small run, and its token files beside it."""
    text = inspect.getsource(argparse).encode()
    (tmp_path / "train.bin").write_bytes(text[:20_000])
    (tmp_path / "validation.bin").write_bytes(text[20_000:24_000])
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    return path
