"""halos status: at once, truthful from the first moment to the last, and legible when narrow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import halos
from halos.errors import ExitCode
from halos.runtime import server_process
from halos.runtime.server_process import ServerProcess
from halos.specification import load_specification
from halos.wire.security import Security
from workers.worker import train

from .conftest import SMALL, command

PATIENCE_S = 200
NARROW = 50
pytestmark = pytest.mark.timeout(280)


@contextmanager
def running(process: ServerProcess) -> Iterator[threading.Event]:
    """Its main loop in a thread, as ``halos coordinator`` and ``halos server`` have it."""
    over, looked = threading.Event(), threading.Event()

    def run() -> None:
        process.run(tick=looked.set)
        over.set()

    process.keeping.announce(process.address)
    thread = threading.Thread(target=run)
    thread.start()
    assert looked.wait(PATIENCE_S)
    try:
        yield over
    finally:
        process.driver.stop()
        thread.join()


@contextmanager
def coordinator(folder: Path, further: str = "") -> Iterator[ServerProcess]:
    (folder / "train.bin").write_bytes(bytes(range(200)) * 40)
    (folder / "validation.bin").write_bytes(bytes(range(200)) * 4)
    (folder / "run.toml").write_text(SMALL + further)
    told, about = server_process.told_by(load_specification(folder / "run.toml"))
    with server_process.coordinator(told, about, "127.0.0.1:0", Security.plain()) as process:
        yield process


def halos_status(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("status", *arguments),
        env={**os.environ, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def told_by(address: str) -> dict[str, Any]:
    done = halos_status(address, "--json")
    assert done.returncode == ExitCode.DONE, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def until(address: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What is told once it is so: of others a server hears within a second or so."""
    for _ in range(PATIENCE_S):
        if condition(told := told_by(address)):
            return told
    raise AssertionError(f"this did not come to be: {told}")


def test_who_is_here_is_told_while_the_others_are_on_their_way(tmp_path: Path) -> None:
    place, plain = tmp_path / "us", Security.plain()
    with coordinator(tmp_path) as root, running(root):
        alone = halos_status(root.address)
        assert [line.split()[:4] for line in alone.stdout.splitlines() if "not here" in line] == [
            ["us", "0", "of", "2"],
            ["eu", "0", "of", "1"],
        ]
        with (
            server_process.region(
                "us", root.address, "127.0.0.1:0", plain, directory=place
            ) as region,
            running(region),
        ):
            with halos.join(region.address) as run:
                told = until(root.address, lambda t: "us/0" in children(t, "us"))
                assert told["expected"] == {"us": 2, "eu": 1}
                check_pictures(root, region, tmp_path)
                run.stop()
            until(root.address, lambda t: "us" in t["children"] and not children(t, "us"))


def children(told: dict[str, Any], region: str) -> dict[str, Any]:
    found: dict[str, Any] = told["children"].get(region, {}).get("children", {})
    return found


def check_pictures(root: ServerProcess, region: ServerProcess, folder: Path) -> None:
    """One worker of three and one region of two are here."""
    for where in (root.address, str(folder / "run.toml"), str(folder / "runs" / "small")):
        shown = halos_status(where, columns=NARROW).stdout.splitlines()
        assert max(map(len, shown)) <= NARROW
        rows = {line.split()[0]: line for line in shown if line.strip()}
        assert "1 of 2" in rows["us"] and "not here" not in rows["us"]
        assert "0 of 1" in rows["eu"] and "not here" in rows["eu"]
    for where in (region.address, str(folder / "us")):
        shown = halos_status(where, columns=NARROW).stdout.splitlines()
        assert max(map(len, shown)) <= NARROW
        assert "us, a region of run small, is connected to its" in shown[0]
        assert any("1 of 2" in line for line in shown)
    assert halos_status(region.address, "--health").stdout == "serving\n"


def test_who_watches_sees_the_end(tmp_path: Path) -> None:
    with (
        coordinator(tmp_path, "\n[root]\nworkers = 1\n") as root,
        running(root) as over,
        subprocess.Popen(
            command("status", root.address, "--watch", "--json"),
            stdout=subprocess.PIPE,
            text=True,
        ) as watching,
    ):
        assert watching.stdout is not None
        assert not json.loads(watching.stdout.readline())["finished"]
        with halos.join(root.address) as run:
            assert train(run)
        *_, last = watching.stdout
        assert json.loads(last)["finished"]
        assert watching.wait(PATIENCE_S) == ExitCode.DONE
        assert over.wait(PATIENCE_S)


def test_without_a_server_it_is_one_sentence(tmp_path: Path) -> None:
    specification = tmp_path / "run.toml"
    specification.write_text(SMALL)
    for where, sentence in (
        ("127.0.0.1:1", "error: 127.0.0.1:1: nothing listens there; start the server"),
        (str(tmp_path), f"error: {tmp_path}: no coordinator of this run is listening"),
        (str(specification), "no coordinator of this run is listening; start it, or give"),
    ):
        for further in ([], ["--json"], ["--watch"]):
            done = halos_status(where, *further)
            assert done.returncode == ExitCode.USER and not done.stdout.strip()
            assert sentence in done.stderr and len(done.stderr.splitlines()) == 1
    assert halos_status("127.0.0.1:1", "--health").returncode == 1


def test_it_imports_nothing_that_computes(tmp_path: Path) -> None:
    """So it takes half a second, not four."""
    script = (
        "import sys; from coordinator.cli import run\n"
        "try: run()\n"
        "finally: print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    with coordinator(tmp_path) as root:
        done = subprocess.run(
            [sys.executable, "-c", script, "status", root.address, "--json"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    assert done.stdout.splitlines()[-1] == "[]"
