"""Processes of a run on this machine: started, watched, started again, and ended in order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from halos.errors import ExitCode, UserError

POLL_S = 0.05
GRACE_S = 60.0  # for a process to save and leave
RESTARTS = 5  # of one process, before its trouble is taken for lasting
STEADY_S = 60.0  # a process that ran for so long has begun anew
SHOWN_LINES = 5  # of a log, in an error


@dataclass
class Process:
    """One ``halos`` command. ``arguments`` is asked again at each start, with the one before."""

    name: str
    arguments: Callable[[], Sequence[str]]
    log: Path
    popen: subprocess.Popen[bytes]
    started_at: float
    restarts: int = 0
    input: IO[bytes] | None = field(default=None, repr=False)

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    @property
    def done(self) -> bool:
        """Whether it has ended in good order; what ended otherwise is started again."""
        return self.popen.poll() == ExitCode.DONE

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-SHOWN_LINES:])


class Fleet:
    """All of them. Their output goes to files in ``logs``; they end when this process does."""

    def __init__(self, logs: Path, threads: int) -> None:
        self.logs = logs
        self.processes: dict[str, Process] = {}
        self._environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, arguments: Callable[[], Sequence[str]]) -> Process:
        """Start ``halos`` with these arguments."""
        log = self.logs / f"{name.replace('/', '-')}.log"
        popen = self._spawn(arguments(), log)
        process = Process(name, arguments, log, popen, time.monotonic())
        self.processes[name] = process
        return process

    def _spawn(self, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "coordinator", *arguments, "--attached"],
                stdin=subprocess.PIPE,  # closes when we end, however that happens
                stdout=out,
                stderr=out,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for us: we end them in order
            )

    def look(self) -> None:
        """Start again what died. ``UserError`` if one made a mistake, or dies again and again."""
        for process in self.processes.values():
            code = process.popen.poll()
            if code is None or code == ExitCode.DONE:
                continue
            if code == ExitCode.USER:
                raise UserError(f"{process.name} cannot go on: {process.last_words()}")
            if time.monotonic() > process.started_at + STEADY_S:
                process.restarts = 0
            if process.restarts >= RESTARTS:
                raise UserError(
                    f"{process.name} ended {RESTARTS + 1} times in a row, last with code {code}; "
                    f"read {process.log}, which ends:\n{process.last_words()}"
                )
            process.restarts += 1
            process.started_at = time.monotonic()
            process.popen = self._spawn(process.arguments(), process.log)

    def wait_for(
        self, process: Process, condition: Callable[[], bool], stop: Callable[[], bool]
    ) -> None:
        """Until it holds or ``stop`` does; ``UserError`` if the process fails first."""
        while not condition() and not stop():
            self.look()
            if process.done:
                return
            time.sleep(POLL_S)

    def wait(self, names: Sequence[str], for_s: float) -> None:
        """Until these have ended by themselves, but no longer than ``for_s``."""
        ends = time.monotonic() + for_s
        while time.monotonic() < ends and any(self.processes[name].lives for name in names):
            time.sleep(POLL_S)

    def end(self, names: Sequence[str]) -> None:
        """Have these save and leave; those that do not within their grace are killed."""
        for name in names:
            if self.processes[name].lives:
                self.processes[name].popen.terminate()
        self.wait(names, GRACE_S)
        for name in names:
            if self.processes[name].lives:
                self.processes[name].popen.kill()
            self.processes[name].popen.wait()
