"""A server whose workers all push at once: its memory, and how fast it applies what comes.

The server is :func:`halos.runtime.server_process.coordinator` in a process of its own. The workers
are real nodes over real sockets in another; only that a round is no training but a meeting: all
hand in the same update once all have fetched theirs.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.core.state import TorchState
from halos.core.topology import ROOT, WorkerPlace
from halos.errors import Interrupted, UserError
from halos.joining import worker_plan
from halos.runtime.loop import LoopThread
from halos.runtime.networked import Networked
from halos.runtime.parent import ParentLink
from halos.runtime.plan import RunPlan
from halos.runtime.server_process import ServerProcess, Told, coordinator
from halos.runtime.wire_bench import PATIENCE_S, RUN, greeting_of, layout_of_size, payload_of
from halos.specification import RunSpecification
from halos.wire.frames import Codecs, DatasetShape, Hello
from halos.wire.security import Security

SAMPLES = 1 << 40  # more than any benchmark comes to
CODECS = Codecs(workers="bf16")
LEAST_S = 1.0  # that the apply and the copy are each measured for


@dataclass(frozen=True)
class Served:
    """Of ``workers`` pushing at once. Memory is the server process's, in MB: before its first model
    was made, when no worker was there yet, and at most."""

    workers: int
    updates_per_s: float
    empty_mb: float
    rest_mb: float
    peak_mb: float


@dataclass(frozen=True)
class Applied:
    """GB/s of memory read and written: by an outer step, and by a copy of the arrays it writes."""

    apply_gb_s: float
    copy_gb_s: float


def measure_apply(parameters: int) -> Applied:
    """On one core. A step reads and writes parameters, momentum and buffer, and reads an update."""
    update = payload_of(layout_of_size(parameters))
    state = TorchState.start(update, OuterSettings(rate=0.1, momentum=0.5), has_parent=False)
    written = [*state.theta, *state.momentum, *state.buffer]
    copies = [torch.empty_like(tensor) for tensor in written]

    def copy() -> None:
        for source, out in zip(written, copies, strict=True):
            out.copy_(source)

    size = update.nbytes
    return Applied(
        apply_gb_s=7 * size / _seconds(lambda: state.apply(update)) / 1e9,
        copy_gb_s=6 * size / _seconds(copy) / 1e9,
    )


def _seconds(work: Callable[[], None]) -> float:
    """Of one call, the fastest of many after a first one."""
    work()
    best, ends = math.inf, time.perf_counter() + LEAST_S
    while (began := time.perf_counter()) < ends:
        work()
        best = min(best, time.perf_counter() - began)
    return best


def measure_server(parameters: int, workers: int, rounds: int) -> Served:
    """``rounds`` in which each of ``workers`` hands in an update, after one that is not counted."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, parameters, workers), daemon=True)
    server.start()
    try:
        address, empty, rest = _told(ours, server)
        seconds = _push(address, parameters, workers, rounds)
        ours.send(None)
        (peak,) = _told(ours, server)
    finally:
        ours.close()
        server.join(10)
        server.kill()
    return Served(workers, workers * rounds / seconds, empty, rest, peak)


def _told(pipe: Connection, server: Any) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"the server of the benchmark does not answer ({server.exitcode})")
    return pipe.recv()


def _specification(folder: Path, workers: int) -> RunSpecification:
    document = {
        "run": {"name": RUN, "directory": folder},
        "root": {"workers": workers},
        "sync": {"preset": "fast"},
        "training": {"local_steps_total": SAMPLES, "batch_size": 1},
        "checkpoint": {"every_s": 1e9},
    }
    return RunSpecification.model_validate(document)


def _serve(pipe: Connection, parameters: int, workers: int) -> None:
    """Until the pipe is closed; says what memory it took when asked."""
    torch.set_num_threads(1)
    empty, layout = _peak_mb(), layout_of_size(parameters)
    with tempfile.TemporaryDirectory() as folder:
        specification = _specification(Path(folder), workers)
        greeting = greeting_of(
            layout, specification.model_dump_json(by_alias=True), (DatasetShape(RUN, SAMPLES),)
        )
        told = Told(specification, greeting, layout, b"", payload_of(layout))
        with coordinator(told, {}, "127.0.0.1:0", Security.plain()) as process:
            pipe.send((process.address, empty, _peak_mb()))
            threading.Thread(target=_answer, args=(pipe, process), daemon=True).start()
            process.run()


def _answer(pipe: Connection, process: ServerProcess) -> None:
    pipe.recv()
    pipe.send((_peak_mb(),))
    process.driver.stop()


def _peak_mb() -> float:
    """Since this process began. (``getrusage`` would begin with the memory of who started it.)"""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError as error:
        raise UserError("halos bench server: needs Linux, which keeps a process's peak") from error
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


class _Meeting:
    """A round in place of training: over when all workers are there."""

    def __init__(self, workers: int, rounds: int, payload: Fragments) -> None:
        self.over = threading.Event()
        self.began = self.ended = 0.0
        self._left = 1 + rounds
        self._payload = payload
        self._barrier = threading.Barrier(workers, self._met)

    def _met(self) -> None:
        self.ended = time.perf_counter()
        self.began = self.began or self.ended
        self._left -= 1
        if self._left < 0:
            self.over.set()

    def __call__(self, job: RunLocalSteps) -> LocalStepsDone:
        try:
            self._barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            raise Interrupted(job.lease.id) from None
        if self.over.is_set():
            raise Interrupted(job.lease.id)
        steps = job.local_steps
        return LocalStepsDone(job.lease.id, steps, steps, 1.0, 1.0, 1.0, self._payload)

    def end(self) -> None:
        self._barrier.abort()


def _push(address: str, parameters: int, workers: int, rounds: int) -> float:
    """Seconds of all rounds but the first."""
    layout = layout_of_size(parameters)
    meeting = _Meeting(workers, rounds, payload_of(layout))
    plan = worker_plan(_specification(Path(), workers), layout, RUN)
    with ExitStack() as stack:
        loop = LoopThread()
        stack.callback(loop.close)
        stack.callback(meeting.end)
        for _ in range(workers):
            stack.enter_context(_worker(loop, address, plan, meeting))
        if not meeting.over.wait(PATIENCE_S):
            raise TimeoutError("the workers of the benchmark do not meet")
        return meeting.ended - meeting.began


@contextmanager
def _worker(loop: LoopThread, address: str, plan: RunPlan, meeting: _Meeting) -> Iterator[None]:
    link = ParentLink(loop, address, Security.plain(), Hello("worker"))
    name = loop.run(link.greet()).name
    nodes = plan.worker_nodes(WorkerPlace(name, ROOT))
    driver = Networked(name, nodes, parent_name=ROOT, trainer=meeting)
    driver.parent = link
    driver.begin()
    link.start(CODECS, driver.from_parent, driver.parent_lost, driver.fail)
    try:
        yield
    finally:
        meeting.end()
        driver.close()
        link.stop()
