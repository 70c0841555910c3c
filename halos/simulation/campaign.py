"""Many experiments, each in a process of its own, so many side by side; what is done stays done."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from halos.errors import UserError
from halos.simulation.experiment import Experiment, run_experiment
from halos.simulation.outcome import Outcome
from halos.specification import RunSpecification

TICK_S = 0.2
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
        raise UserError(f"{path}: cannot be read ({error}); remove it") from error


# ---------------------------------------------------------------- one process a job


@dataclass(frozen=True)
class _Shared:
    """What parent and children see of each other. ``shares``: how much of each job is done."""

    shares: Any  # an array in shared memory
    stop: Any  # an event of multiprocessing


_shared: _Shared | None = None


def _begin(shared: _Shared) -> None:
    """In a child, before its job: Ctrl-C is the parent's to heed, and without it all is in vain."""
    global _shared  # noqa: PLW0603  how a pool hands over what cannot travel with a job
    import signal

    _shared = shared
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _run(index: int, job: Job) -> Outcome | None:
    """``None`` if it was stopped."""
    assert _shared is not None
    shares, asked, stop = _shared.shares, _shared.stop, threading.Event()
    if asked.is_set():
        return None

    def heed() -> None:
        asked.wait()
        stop.set()

    def progress(share: float) -> None:
        shares[index] = share

    threading.Thread(target=heed, daemon=True).start()
    outcome = run_experiment(job.experiment, progress=progress, stop=stop)
    if not outcome.finished:
        return None
    path = job.path()
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(outcome.to_json()))
    partial.replace(path)
    return outcome


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
    to_do = [index for index, outcome in enumerate(outcomes) if outcome is None]
    context = multiprocessing.get_context("spawn")
    shares = context.RawArray("d", [float(outcome is not None) for outcome in outcomes])
    shared = _Shared(shares, context.Event())
    with ProcessPoolExecutor(
        max(1, min(at_once, len(to_do))),
        context,
        _begin,
        (shared,),
        max_tasks_per_child=1,  # what one leaves in memory the next need not have
    ) as pool:
        futures = {pool.submit(_run, index, jobs[index]): index for index in to_do}
        try:
            _wait(futures, outcomes, shared, stop, told)
        finally:
            shared.stop.set()
            pool.shutdown(cancel_futures=True)
    return outcomes


def _wait(
    futures: dict[Future[Outcome | None], int],
    outcomes: list[Outcome | None],
    shared: _Shared,
    stop: threading.Event,
    told: Callable[[float, int], None],
) -> None:
    """Fill ``outcomes`` in, as they come."""
    left = set(futures)
    while left:
        done, left = wait(left, TICK_S, FIRST_COMPLETED)
        for future in done:
            try:
                outcomes[futures[future]] = future.result()
            except BrokenProcessPool as error:
                raise UserError(
                    "a process that simulated was killed, perhaps for want of memory; "
                    "start again with a lower --jobs"
                ) from error
        told(sum(shared.shares) / len(outcomes), sum(o is not None for o in outcomes))
        if stop.is_set() and not shared.stop.is_set():
            shared.stop.set()
            for future in left:
                future.cancel()
            left = {future for future in left if not future.cancelled()}
