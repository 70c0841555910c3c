"""Many experiments, each in a process of its own, so many side by side; what is done stays done."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from halos.errors import UserError
from halos.simulation.experiment import Experiment, run_experiment
from halos.simulation.outcome import Outcome
from halos.specification import RunSpecification

TICK_S = 0.2
STEP = 0.005  # of a job, before it tells of its progress again
STEM_LENGTH = 100
COMPUTING = ("core", "codec", "training", "simulation")  # rooms whose code decides what comes out
TELLING = ("campaign.py", "comparison.py", "report.py", "pictures.py")  # and what only tells of it


@dataclass(frozen=True)
class Job:
    """An experiment whose outcome is kept in ``folder``. ``data`` identifies what it trains on."""

    experiment: Experiment
    folder: Path
    data: str

    def path(self) -> Path:
        """Named after all that the outcome depends on, so that what is there can be taken up."""
        digest = hashlib.sha256(f"{sources()} {self._given()}".encode()).hexdigest()
        experiment = self.experiment
        return self.folder / f"{stem(experiment.method.name)}-{experiment.seed}-{digest[:10]}.json"

    def _given(self) -> str:
        experiment = self.experiment
        method, specification = experiment.method, experiment.specification
        given = {
            "environment": experiment.environment.model_dump(mode="json"),
            "method": [type(method.settings).__name__, method.settings.model_dump(mode="json")],
            "name": method.name,
            "seed": experiment.seed,
            "specification": specification and specification.model_dump(mode="json"),
            "data": self.data,
            "factory": _factory(specification),
            "length": [experiment.local_steps, experiment.hours, experiment.window_s],
        }
        return json.dumps(given, sort_keys=True)


def stem(method: str) -> str:
    """``method`` as part of a file's name."""
    plain = re.sub(r"[^\w.=]+", "-", method)
    if len(plain) <= STEM_LENGTH:
        return plain
    return f"{plain[:STEM_LENGTH]}-{hashlib.sha256(method.encode()).hexdigest()[:8]}"


@cache
def sources() -> str:
    """Changes whenever code does that outcomes depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for room in COMPUTING:
        for file in sorted((resources.files("halos") / room).iterdir(), key=lambda f: f.name):
            if file.name.endswith(".py") and file.name not in TELLING:
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _factory(specification: RunSpecification | None) -> str | None:
    """The code of a model of the user's own."""
    model = specification.model if specification is not None else None
    if model is None or model.factory is None or model.folder is None:
        return None
    code = b"".join(file.read_bytes() for file in sorted(model.folder.glob("*.py")))
    return hashlib.sha256(code).hexdigest()


def kept(job: Job) -> Outcome | None:
    """What an earlier campaign left. Raises ``UserError`` if it cannot be read."""
    path = job.path()
    try:
        return Outcome.load(path) if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no whole outcome; remove it") from error


# ---------------------------------------------------------------- one process a job


def _run(job: Job, parent: Connection) -> None:
    """In a process of its own: tell ``parent`` shares that are done, then the path or the error.

    Ctrl-C is the parent's to heed; without the parent all is in vain.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    told = 0.0

    def progress(share: float) -> None:
        nonlocal told
        if share >= told + STEP:
            told = share
            parent.send(share)

    try:
        outcome = run_experiment(job.experiment, progress=progress)
    except UserError as error:
        parent.send(error)
        return
    try:
        parent.send(written(outcome, job.path()))
    except OSError as error:
        parent.send(UserError(f"{job.folder}: cannot be written: {error.strerror}"))


def written(outcome: Outcome, path: Path) -> Path:
    """Whole or not at all."""
    partial = path.with_suffix(".part")
    try:
        partial.write_text(json.dumps(outcome.to_json()))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass
class _Running:
    """One job under way."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, job: Job) -> _Running:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(job, there))
        # A child that is still importing would answer Ctrl-C with a traceback.
        heeded = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heeded)
        there.close()
        return cls(process, here)

    def heard(self) -> float | Path:
        """Raises ``UserError``."""
        try:
            said: float | Path | UserError = self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            if code is not None and code < 0:
                raise UserError(
                    f"a process that simulated was killed by signal {-code}, perhaps for want of "
                    "memory; start again with a lower --jobs"
                ) from None
            raise RuntimeError("a process that simulated failed; its traceback is above") from None
        if isinstance(said, UserError):
            raise said
        return said

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


def run_campaign(
    jobs: Sequence[Job],
    *,
    at_once: int,
    stop: threading.Event,
    told: Callable[[float, int], None],
) -> list[Outcome | None]:
    """Outcomes in the order of ``jobs``; ``None`` for what ``stop`` left unfinished.

    ``told`` hears several times a second what share of all is done, and how many jobs. Raises
    ``UserError`` for what a job cannot do, and if a process is killed.
    """
    outcomes = [kept(job) for job in jobs]
    shares = [float(outcome is not None) for outcome in outcomes]
    to_do = deque(index for index, outcome in enumerate(outcomes) if outcome is None)
    running: dict[int, _Running] = {}
    try:
        while (to_do or running) and not stop.is_set():
            while to_do and len(running) < at_once:
                index = to_do.popleft()
                running[index] = _Running.start(jobs[index])
            told(sum(shares) / len(jobs), sum(outcome is not None for outcome in outcomes))
            for index in _with_news(running):
                said = running[index].heard()
                if isinstance(said, Path):
                    outcomes[index], shares[index] = Outcome.load(said), 1.0
                    running.pop(index).end()
                else:
                    shares[index] = said
    finally:
        for one in running.values():
            one.end()
    return outcomes


def _with_news(running: Mapping[int, _Running]) -> list[int]:
    """Waits a moment for some."""
    ready = wait([one.connection for one in running.values()], TICK_S)
    return [index for index, one in running.items() if one.connection in ready]
