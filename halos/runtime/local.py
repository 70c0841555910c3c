"""A whole run in one process: ``halos train``, ``halos demo``, notebooks and tests.

The order of events is either that of arrival, or fixed: then it follows from the specification
alone, and so does every bit of the result.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from halos.core.fragments import Fragments
from halos.core.membership import MembershipSettings
from halos.core.messages import Node, NodeId
from halos.core.server import Server
from halos.core.state import TorchState
from halos.core.tensors import TensorState
from halos.core.topology import ROOT
from halos.errors import UserError
from halos.runtime.capture import Capture, Restored, capture
from halos.runtime.dispatcher import Trainer
from halos.runtime.evaluation import Evaluator
from halos.runtime.inprocess import InProcess
from halos.runtime.keeping import STARTS
from halos.runtime.losses import LOSSES, Losses
from halos.runtime.metrics import RunMetrics
from halos.runtime.plan import RunPlan
from halos.runtime.prepare import Prepared, roundings_of
from halos.runtime.recorded import facts_of
from halos.runtime.timing import UniformTime
from halos.runtime.trace import TraceWriter, open_trace
from halos.runtime.virtual import VirtualClock
from halos.store import snapshots
from halos.training.inner import LocalTrainer
from halos.training.model import build_model
from halos.wire.roundtrip import RoundTrip

log = logging.getLogger(__name__)

Order = Literal["arrival", "fixed"]
Beginning = Literal["new", "resume", "replace"]
HOPELESS = 10  # rounds of a worker in a row that were not finite
EVENTS_A_TICK = 16  # of a fixed order, between two looks at checkpoints and evaluation
ALONE = MembershipSettings(heartbeat_interval_s=0)  # the nodes of one process die together


@dataclass
class LocalRun:
    """A run, ready to go on. Use :func:`open_run`, which also closes it."""

    prepared: Prepared
    driver: InProcess | VirtualClock
    trainers: dict[NodeId, LocalTrainer]
    evaluator: Evaluator
    metrics: RunMetrics = field(default_factory=RunMetrics)
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _writing: Future[Path] | None = None
    _saved_at: float = field(default_factory=time.monotonic)
    _opened_at: float = field(default_factory=time.monotonic)
    _evaluated_at: float = 0.0

    @property
    def folder(self) -> Path:
        return self.prepared.specification.run.directory

    @property
    def elapsed_s(self) -> float:
        """Real seconds: of the whole run, or with a fixed order since it was opened."""
        return self.driver.now if isinstance(self.driver, InProcess) else self.open_s

    @property
    def open_s(self) -> float:
        """Real seconds since the run was opened here."""
        return time.monotonic() - self._opened_at

    @property
    def root(self) -> Server:
        root = self.driver.nodes[ROOT]
        assert isinstance(root, Server)
        return root

    @property
    def model(self) -> Fragments:
        """The root's parameters."""
        tensors = self.root.tensors
        assert isinstance(tensors, TorchState)
        return tensors.publish()

    def run(self, *, tick: Callable[[], None] | None = None, events: int | None = None) -> bool:
        """Train until the end, a number of events (fixed order only), or :meth:`stop`.

        Saves and evaluates as the specification says, and at the end. ``tick`` is called a few
        times a second. Returns whether the run is over. Raises ``UserError`` when a worker only
        computes numbers that are not finite.
        """

        def look() -> None:
            self._give_up_if_hopeless()
            self._save_if_due()
            self._evaluate_if_due()
            if tick is not None:
                tick()

        if isinstance(self.driver, InProcess):
            return self.driver.run(tick=look)
        handled = 0
        while not self.driver.finished and not self.driver.stopping.is_set():
            step = EVENTS_A_TICK if events is None else min(EVENTS_A_TICK, events - handled)
            if step == 0:
                break
            self.driver.run(events=step)
            handled += step
            look()
        return self.driver.finished

    def stop(self) -> None:
        """Have ``run`` return soon. Safe in a signal handler."""
        self.driver.stop()

    def save(self) -> Path:
        """Write a checkpoint now, and wait for it. Raises ``UserError`` if it cannot be written."""
        if self._writing is not None:
            self._writing.exception()
        return self._write(self._capture())

    def _capture(self) -> Capture:
        sequence = self.driver.sequence if isinstance(self.driver, VirtualClock) else 0
        state = capture(self.driver, sequence, self.trainers)
        prepared = self.prepared
        order: Order = "fixed" if isinstance(self.driver, VirtualClock) else "arrival"
        about = {
            "facts": _facts(prepared, order),
            "model": prepared.model.model_dump(mode="json"),
            "specification": prepared.specification.model_dump(mode="json", by_alias=True),
        }
        return replace(state, manifest={**about, **state.manifest})

    def _write(self, state: Capture) -> Path:
        keep = self.prepared.specification.checkpoint.keep
        return snapshots.write(checkpoints(self.folder), state.manifest, state.tensors, keep=keep)

    def _give_up_if_hopeless(self) -> None:
        """A worker that computes nothing but NaN would be given samples for ever."""
        for worker, row in self.metrics.not_finite.items():
            if row >= HOPELESS:
                path = self.save()
                raise UserError(
                    f"worker {worker} computed numbers that are not finite {row} rounds in a row; "
                    f"lower [inner] learning_rate and resume from {path}"
                )

    def _save_if_due(self) -> None:
        """Begin a checkpoint in the background; training goes on whatever becomes of it."""
        if self._writing is not None:
            if not self._writing.done():
                return
            if error := self._writing.exception():
                log.warning("%s", error)
            self._writing = None
        if time.monotonic() >= self._saved_at + self.prepared.specification.checkpoint.every_s:
            self._saved_at = time.monotonic()
            self._writing = self._writer.submit(self._write, self._capture())

    def _evaluate_if_due(self) -> None:
        if not self.evaluator.collect():
            return
        if time.monotonic() >= self._evaluated_at + self.prepared.specification.evaluation.every_s:
            self._evaluated_at = time.monotonic()
            reported = self.root.state.reported
            self.evaluator.submit(self.model, self.elapsed_s, reported.local_steps, reported.tokens)

    def close(self) -> None:
        self.driver.close()
        self._writer.shutdown(wait=True)
        self.evaluator.close()


def checkpoints(folder: Path) -> Path:
    return folder / "checkpoints"


@contextmanager
def open_run(
    prepared: Prepared,
    *,
    order: Order = "arrival",
    beginning: Beginning = "new",
    trace: Path | None = None,
) -> Iterator[LocalRun]:
    """Begin a run in its directory, go on with the one that is there, or replace that.

    Raises ``UserError`` when the directory is in use, holds a run although this one is new, or
    when the one to be resumed or replaced is not this one.
    """
    folder = prepared.specification.run.directory
    with ExitStack() as stack:
        stack.enter_context(snapshots.locked(folder))
        if beginning == "replace":
            _clear(folder, prepared.identity.run)
        if beginning == "new" and snapshots.numbered(checkpoints(folder)):
            raise UserError(
                f"{folder}: there is a run in this directory already; go on with it by --resume, "
                "or give this one another run.directory"
            )
        run = _begin(prepared, order, _saved(prepared, order) if beginning == "resume" else None)
        stack.callback(run.close)
        run.driver.observers.append(run.metrics)
        if trace is not None:
            file = stack.enter_context(open_trace(trace))
            run.driver.observers.append(TraceWriter(file, facts_of(prepared, ALONE)))
        yield run


def clear(folder: Path, name: str) -> None:
    """Clear a run directory of the run in it, if that has this name, and of nothing else.

    Raises ``UserError`` if it holds another, or is in use.
    """
    with snapshots.locked(folder):
        _clear(folder, name)


def _clear(folder: Path, name: str) -> None:
    earlier = snapshots.numbered(checkpoints(folder))
    if earlier:
        there = snapshots.newest(checkpoints(folder)).manifest["facts"]["[run] name"]
        if there != name:
            raise UserError(f"{folder}: holds run {there!r}, not {name!r}; give another directory")
    for snapshot in earlier:
        shutil.rmtree(snapshot)
    for processes in ("servers", "workers"):
        if any((folder / processes).glob(f"**/{STARTS}")):
            shutil.rmtree(folder / processes)
    (folder / LOSSES).unlink(missing_ok=True)


def _facts(prepared: Prepared, order: Order) -> dict[str, Any]:
    """What may not change between a checkpoint and its resume, by where the user sets it."""
    specification, identity = prepared.specification, prepared.identity
    topology = specification.topology
    return {
        "[run] name": identity.run,
        "[run] seed": specification.run.seed,
        "[model]": identity.model,
        "[data]": list(identity.datasets),
        "[training] length": prepared.total_samples,
        "[[regions]] and workers": {server.name: server.parent for server in topology.servers}
        | {worker.name: worker.parent for worker in topology.workers},
        "--fixed-order": order == "fixed",
    }


def _saved(prepared: Prepared, order: Order) -> Capture:
    """The newest checkpoint, if it is one of this run."""
    snapshot = snapshots.newest(checkpoints(prepared.specification.run.directory))
    then = snapshot.manifest["facts"]
    for name, now in _facts(prepared, order).items():
        if then[name] != now:
            raise UserError(
                f"{snapshot.path}: this checkpoint is of a run with another {name}; resume it with "
                "what it was begun with, or begin a new run in another run.directory"
            )
    return Capture(snapshot.manifest, snapshot.tensors)


def _begin(prepared: Prepared, order: Order, saved: Capture | None) -> LocalRun:
    topology = prepared.specification.topology
    if prepared.specification.inner.device != "cuda":
        cores = os.cpu_count() or 1
        fair = 1 if order == "fixed" else max(1, cores // len(topology.workers))
        torch.set_num_threads(fair)
    trainers = {worker.name: prepared.trainer() for worker in topology.workers}
    restored = Restored(saved) if saved is not None else None
    plan = RunPlan(
        topology=topology,
        identity=prepared.identity,
        membership=ALONE,
        samples={prepared.identity.datasets[0]: prepared.total_samples},
        server_settings=lambda _: prepared.server_settings(),
        tensors=lambda name: _tensors(prepared, name, restored),
    )
    nodes = plan.nodes()
    if restored is not None:
        nodes = plan.nodes(restored.node_states(nodes))
        for name, trainer in trainers.items():
            trainer.restore(restored.worker_tensors(name))
    driver = _driver(prepared, order, nodes, trainers, saved)
    for trainer in trainers.values():
        trainer.stop = driver.stopping
    if restored is None:
        driver.start()
    else:
        driver.restore(restored.under_way())
        driver.finished = restored.finished
    evaluation = prepared.specification.evaluation
    losses = Losses(prepared.specification.run.directory)
    evaluator = Evaluator(
        build_model(prepared.model, 0),
        prepared.layout,
        prepared.dataset,
        evaluation.batches,
        losses,
    )
    run = LocalRun(prepared, driver, trainers, evaluator)
    losses.forget_after(run.root.state.reported.local_steps if restored is not None else -1)
    return run


def _tensors(prepared: Prepared, server: NodeId, restored: Restored | None) -> TensorState:
    settings, links = prepared.outer_settings(server), roundings_of(prepared.specification)
    if restored is not None:
        return restored.server_tensors(server, settings, links)
    return TorchState.start(prepared.start, settings, links, has_parent=server != ROOT)


def _driver(
    prepared: Prepared,
    order: Order,
    nodes: dict[NodeId, Node],
    trainers: dict[NodeId, LocalTrainer],
    saved: Capture | None,
) -> InProcess | VirtualClock:
    train: dict[NodeId, Trainer] = {name: trainer.run for name, trainer in trainers.items()}
    now = saved.manifest["now"] if saved is not None else 0.0
    isolate = RoundTrip(prepared.specification.resolved_wire.codecs)
    if order == "arrival":
        return InProcess(nodes, train, isolate=isolate, now=now)
    return VirtualClock(
        nodes,
        UniformTime(prepared.specification.topology),
        train,
        isolate=isolate,
        threads=min(os.cpu_count() or 1, len(trainers)),
        undo={name: trainer.undo for name, trainer in trainers.items()},
        now=now,
        sequence=saved.manifest["sequence"] if saved is not None else 0,
    )
