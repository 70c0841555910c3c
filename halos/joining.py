"""Joining a run as a worker: ``halos.join`` (DESIGN 11). The worker process is written on it."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halos.core.fragments import ModelLayout, first_difference
from halos.core.membership import Session, session_of
from halos.core.messages import Leave, NodeId, RunLocalSteps
from halos.core.topology import WorkerPlace
from halos.core.worker import Worker
from halos.errors import UserError
from halos.run import Run
from halos.runtime.capture import Restored, capture
from halos.runtime.handover import Handover
from halos.runtime.keeping import Keeping, kept_in
from halos.runtime.loop import LoopThread
from halos.runtime.networked import Networked
from halos.runtime.parent import ParentLink
from halos.runtime.plan import RunPlan
from halos.runtime.prepare import (
    PreparedData,
    identity_of,
    prepare_data,
    specification_here,
)
from halos.runtime.telemetry import worker_telemetry
from halos.runtime.trace import RunFacts, TraceWriter, open_trace
from halos.specification import RunSpecification
from halos.training.constants import load_constants
from halos.training.corpus import Progress
from halos.wire.chunks import layout_from
from halos.wire.frames import Channel, Codecs, Greeting, Hello
from halos.wire.security import Security, check_dial

log = logging.getLogger(__name__)

TELL_S = 1.0
ACKNOWLEDGED_S = 5.0  # how long a leaving worker waits for word of its last update
POLL_S = 0.02


def join(
    address: str,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    region: str | None = None,
    name: str | None = None,
    certs: str | Path | None = None,
    insecure: bool = False,
    directory: str | Path | None = None,
    data: str | Path | None = None,
    device: str | None = None,
    trace: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Join the run of the server at ``address`` (HOST:PORT) and adopt its settings.

    Without ``model`` the run's own is built, on ``device`` (auto, cpu, cuda) if that is given.
    ``region`` is checked against the server's; ``name`` is the worker's within it, by default one
    that is free. ``certs`` is a folder that ``halos certs issue`` made. With ``directory``, the
    optimizer's state is kept there between two starts. ``data`` is the folder of the run's token
    files here, where that is not the coordinator's. Waits for the server to be there; close
    the run, or use it as a context.

    Raises ``UserError``: one sentence on what to put right.
    """
    security = Security.from_folder(Path(certs)) if certs is not None else Security.plain()
    check_dial(address, security, insecure)
    with ExitStack() as stack:
        loop = LoopThread()
        stack.callback(loop.close)
        link = ParentLink(loop, address, security, Hello("worker", name or ""))
        greeting = loop.run(link.greet())
        if region is not None and greeting.server != region:
            raise UserError(
                f"region: {address} is the server of {greeting.server!r}, not {region!r}"
            )
        specification = _specification(greeting, device, None if data is None else Path(data))
        samples = prepare_data(specification, progress)
        handover = Handover()
        worker = _Worker(loop, link, handover)
        run = Run.of(handover, specification, samples, model, optimizer, worker.close)
        plan = worker_plan(specification, run.replica.layout, samples.name)
        if (difference := _difference(run, samples, greeting)) is not None:
            _knock(link, plan, WorkerPlace(greeting.name, greeting.server))
            raise UserError(difference)
        if greeting.layout.constants:
            load_constants(run.model, loop.run(link.constants()))
        run.name = greeting.name
        worker.open(run, specification, plan, greeting, directory, trace)
        stack.pop_all()
        return run


def _specification(greeting: Greeting, device: str | None, data: Path | None) -> RunSpecification:
    """The run's, but for what is this machine's own affair."""
    specification = specification_here(greeting.specification, data)
    if device is None:
        return specification
    inner = specification.inner.model_copy(update={"device": device})
    return specification.model_copy(update={"inner": inner})


def _difference(run: Run, samples: PreparedData, greeting: Greeting) -> str | None:
    """What of the run is another here, as a sentence; of the model the first such parameter."""
    difference = first_difference(run.replica.layout, layout_from(greeting.layout))
    if difference is not None:
        return f"model: is not that of run {greeting.run!r}: {difference}"
    theirs = [dataset.identity for dataset in greeting.datasets]
    if samples.name not in theirs:
        return (
            f"[data]: the token files here are not those of run {greeting.run!r}, but "
            f"{samples.name} for {' or '.join(theirs)}; copy them anew"
        )
    return None


def _knock(link: ParentLink, plan: RunPlan, place: WorkerPlace) -> None:
    """Ask to be let in, in vain, so that the server's log tells of it too."""
    answered = threading.Event()
    link.start(Codecs(), lambda *_: answered.set(), answered.set, lambda _: answered.set())
    session = plan.worker_nodes(place)[session_of(place.name)]
    assert isinstance(session, Session)
    link.send(Channel.SESSION, session.join)
    answered.wait(ACKNOWLEDGED_S)
    link.stop()


@dataclass
class _Worker:
    """A worker's nodes and connection, behind the loop that trains."""

    loop: LoopThread
    link: ParentLink
    handover: Handover
    rounds: int = 0
    tokens: int = 0
    loss: float | None = None
    _driver: Networked | None = None
    _keeping: Keeping | None = None
    _replica: Any = None
    _closing: ExitStack = field(default_factory=ExitStack)
    _watching: threading.Thread | None = None
    _told: float = 0.0

    def open(
        self,
        run: Run,
        specification: RunSpecification,
        plan: RunPlan,
        greeting: Greeting,
        directory: str | Path | None,
        trace: str | Path | None,
    ) -> None:
        """Start the nodes and the connection."""
        self._replica = run.replica
        name, layout = greeting.name, run.replica.layout
        saved = None
        if directory is not None:
            facts = {"[run] name": greeting.run, "[model]": layout.hash, "role": name}
            kept = kept_in(Path(directory), facts, every_s=float("inf"), keep=1)
            self._keeping = self._closing.enter_context(kept)
            saved = self._keeping.saved()
        restored = Restored(saved) if saved is not None else None
        place = WorkerPlace(name, greeting.server)
        nodes = plan.worker_nodes(place)
        if restored is not None:
            nodes = plan.worker_nodes(place, restored.node_states({name: nodes[name]}))
            run.replica.restore(restored.worker_tensors(name))
        driver = Networked(
            name,
            nodes,
            parent_name=greeting.server,
            trainer=self._train,
            give_up=self.handover.give_up,
        )
        driver.parent = self.link
        if trace is not None:
            file = self._closing.enter_context(open_trace(Path(trace)))
            driver.observers.append(TraceWriter(file, _facts(plan, specification, place)))
        self._driver = driver
        driver.begin()
        codecs = specification.resolved_wire.codecs
        self.link.start(codecs, driver.from_parent, driver.parent_lost, driver.fail)
        self._watching = threading.Thread(target=self._watch, name=f"{name} watches", daemon=True)
        self._watching.start()

    def _train(self, job: RunLocalSteps) -> Any:
        done = self.handover(job)
        self.rounds += 1
        self.tokens += done.tokens
        self.loss = done.loss
        return done

    def _watch(self) -> None:
        """Until the run is over or left: tell the loop that trains."""
        assert self._driver is not None
        try:
            finished = self._driver.run(tick=self._tell)
        except Exception as error:  # noqa: BLE001 - raised in the loop that trains
            self.handover.close(error=error)
        else:
            self.handover.close(finished=finished)

    def _tell(self) -> None:
        assert self._driver is not None
        if time.monotonic() >= self._told + TELL_S:
            self._told = time.monotonic()
            status = worker_telemetry(
                self._driver.main, self._driver, self.rounds, self.tokens, self.loss
            )
            self.link.tell(json.dumps(status))

    def close(self) -> None:
        """Leave: wait a little for word of the last update, save, say goodbye."""
        if (driver := self._driver) is None:
            return
        self._driver = None
        try:
            self._wait_for_word(driver)
            goodbye = self._goodbye(driver)
            driver.close()
            if self._watching is not None:
                self._watching.join()
            self.link.stop(goodbye)
            if self._keeping is not None:
                nodes = {driver.main: driver.nodes[driver.main]}
                self._keeping.save(lambda: capture(driver, 0, {driver.main: self._replica}, nodes))
        finally:
            self._closing.close()
            self.loop.close()

    def _wait_for_word(self, driver: Networked) -> None:
        worker = driver.nodes[driver.main]
        assert isinstance(worker, Worker)
        ends = time.monotonic() + ACKNOWLEDGED_S
        while worker.state.finished and self.link.connected and time.monotonic() < ends:
            time.sleep(POLL_S)

    def _goodbye(self, driver: Networked) -> Leave | None:
        """None where the run is over, or an update is kept that its lease is still needed for."""
        worker, session = driver.nodes[driver.main], driver.nodes[session_of(driver.main)]
        assert isinstance(worker, Worker) and isinstance(session, Session)
        if driver.finished or worker.state.finished or session.state.fence is None:
            return None
        return Leave(session.state.fence)


def worker_plan(specification: RunSpecification, layout: ModelLayout, data_name: str) -> RunPlan:
    """Of which a worker's own nodes are made."""

    def no_server(name: NodeId) -> Any:
        raise AssertionError(f"{name}: a worker's plan has no servers")

    return RunPlan(
        topology=specification.topology,
        identity=identity_of(specification, layout, data_name),
        membership=specification.membership,
        samples={},
        server_settings=no_server,
        tensors=no_server,
        apart=True,
    )


def _facts(plan: RunPlan, specification: RunSpecification, place: WorkerPlace) -> RunFacts:
    return RunFacts(
        run=plan.identity.run,
        model=plan.identity.model,
        datasets=plan.identity.datasets,
        seed=specification.run.seed,
        servers={},
        workers={place.name: place.parent},
        membership=specification.membership,
        apart=True,
    )
