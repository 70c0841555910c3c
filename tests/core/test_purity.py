"""The core decides without doing (DESIGN 3): what its source may not even name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import halos.core

CORE = Path(halos.core.__file__).parent
DOES = {
    "asyncio", "concurrent", "coordinator", "datetime", "grpc", "io", "logging", "multiprocessing",
    "os", "pathlib", "queue", "random", "secrets", "shutil", "signal", "socket", "subprocess",
    "sys", "tempfile", "threading", "time", "uuid", "workers",
}  # fmt: skip
ROOMS = {"runtime", "specification", "store", "training"}
BUILTINS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}
TORCH = {"cuda", "device", "from_file", "load", "manual_seed", "save", "seed"}


def impurities(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (f"import {n.name}" for n in names if banned(n.name))
            case ast.ImportFrom(module=str(module), names=names, level=0):
                full = [f"{module}.{n.name}" for n in names]
                yield from (f"from {module} import" for name in full if banned(name))
            case ast.ImportFrom():
                yield "a relative import"
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield f"{name}()"
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in TORCH:
                yield f"torch.{name}"


def banned(module: str) -> bool:
    first, _, rest = module.partition(".")
    return first in DOES or (first == "halos" and rest.partition(".")[0] in ROOMS)


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.name)
def test_a_module_of_the_core_does_nothing(path: Path) -> None:
    assert list(impurities(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path as p",
        "from random import random",
        "from halos import training",
        "from halos.store.snapshots import Store",
        "from . import ledger",
        "def f():\n    import threading",
        "open('x')",
        "torch.save(x, y)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(impurities(source))


def test_the_check_lets_tensors_through() -> None:
    assert not list(impurities("import torch\nfrom halos.core.ledger import Ledger\ntorch.add(a)"))
