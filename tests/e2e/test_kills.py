"""kill -9 of every role in one run, and a server that stands still: the run comes to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from halos.errors import UserError
from halos.runtime.control import announced, status_of_server
from halos.wire.security import Security

from .conftest import PATIENCE_S, SMALL, command, wait_for

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)
SETTINGS = """
[checkpoint]
every_s = 1

[membership]
heartbeat_interval_s = 1
heartbeat_timeout_s = 5
retry_s = 0.5
drain_timeout_s = 20

[evaluation]
every_s = 2
batches = 2
"""
STEPS = 12_000
FEW_STEPS = 600
STILL_S = 30
REGIONS = SMALL[SMALL.index("[[regions]]") :]
ONE_WORKER = """
[[regions]]
name = "us"
workers = 1
"""


@dataclass
class Up:
    """``halos up`` at work, and the processes that it started."""

    process: subprocess.Popen[str]
    folder: Path

    def place(self, name: str) -> Path:
        if name == "coordinator":
            return self.folder
        return self.folder / ("workers" if "/" in name else "servers") / name

    def pid(self, name: str) -> int:
        """Of a process of the run, as it wrote into its own folder."""
        lock = self.place(name) / ".lock"
        return int((lock.read_text() if lock.exists() else "") or 0)

    def credited(self) -> int:
        assert self.process.poll() is None, "the run ended too early for this test"
        address = announced(self.folder)
        try:
            told = status_of_server(address, Security.plain()) if address else {"credited": 0}
        except UserError:
            return 0  # it is being started again
        return int(told["credited"])

    def goes_on(self) -> None:
        """Until samples were credited that were not yet."""
        before = wait_for(self.credited)
        wait_for(lambda: self.credited() > before)

    def kill(self, name: str) -> None:
        """kill -9, and wait for another process in its place."""
        pid = wait_for(lambda: self.pid(name))
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.is_another(name, pid))

    def is_another(self, name: str, pid: int) -> bool:
        assert self.process.poll() is None, "halos up ended"
        return self.pid(name) not in (0, pid)

    def stands_still(self, pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def end(self) -> dict[str, Any]:
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        result: dict[str, Any] = json.loads(output)
        return result


@contextmanager
def run_up(small: Path, steps: int = STEPS) -> Iterator[Up]:
    text = small.read_text().replace("local_steps_total = 60", f"local_steps_total = {steps}")
    small.write_text(text + SETTINGS)
    arguments = command("up", "run.toml", "--json")
    with subprocess.Popen(
        arguments, cwd=small.parent, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Up(process, small.parent / "runs" / "small")
        finally:
            process.terminate()


def check_books(folder: Path, result: dict[str, Any], steps: int = STEPS) -> None:
    """Every sample was credited once: in the result, and as ranges in the last checkpoint."""
    total = 2 * steps
    assert result["finished"] and result["credited"] == result["total"] == total
    manifest = json.loads(max(folder.glob("checkpoints/*/manifest.json")).read_text())
    credited = manifest["nodes"]["root"]["leasing"]["ledger"]["credited"]
    assert credited == {"starts": [0], "ends": [total], "total": total}


@pytest.mark.smoke
def test_the_only_worker_and_its_server_are_killed(small: Path) -> None:
    """Without either nothing is credited, so that the run cannot end before they are back."""
    small.write_text(small.read_text().replace(REGIONS, ONE_WORKER))
    with run_up(small, FEW_STEPS) as up:
        for name in ("us/0", "us"):
            up.goes_on()
            up.kill(name)
        result = up.end()
    check_books(up.folder, result, FEW_STEPS)


@pytest.mark.slow
def test_a_worker_a_server_and_the_coordinator_are_killed_one_after_the_other(
    small: Path,
) -> None:
    with run_up(small) as up:
        up.goes_on()
        for name in ("us/0", "us", "coordinator"):
            up.kill(name)
            up.goes_on()
        result = up.end()
    check_books(up.folder, result)


@pytest.mark.slow
def test_a_server_that_stands_still_for_half_a_minute_holds_up_nobody_else(small: Path) -> None:
    with run_up(small, 2 * STEPS) as up:
        up.goes_on()
        stopped = wait_for(lambda: up.pid("us"))
        os.kill(stopped, signal.SIGSTOP)
        ends, rises = time.monotonic() + STILL_S, 0
        # The one push that it may have had on its way is credited still; the rest is others'.
        while time.monotonic() < ends or rises < 3:
            up.goes_on()
            rises += 1
        assert up.stands_still(stopped)
        os.kill(stopped, signal.SIGCONT)
        up.goes_on()
        result = up.end()
    check_books(up.folder, result, 2 * STEPS)


@pytest.mark.slow
def test_nothing_is_left_of_a_run_whose_halos_up_was_killed(small: Path) -> None:
    with run_up(small) as up:
        up.goes_on()
        pids = [
            wait_for(lambda name=name: up.pid(name))
            for name in ("coordinator", "us", "eu", "us/0", "us/1", "eu/0")
        ]
        up.process.kill()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
