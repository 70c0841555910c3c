"""A parameter server as a process: the coordinator's root, or one region's."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from halos.core.fragments import Fragments, ModelLayout, zeros
from halos.core.membership import Identity
from halos.core.messages import NodeId
from halos.core.server import Server
from halos.core.state import TorchState
from halos.core.topology import ROOT, ServerPlace
from halos.runtime.capture import Capture, Restored, capture
from halos.runtime.children import Children
from halos.runtime.keeping import Keeping, kept_in
from halos.runtime.loop import LoopThread
from halos.runtime.metrics import RunMetrics
from halos.runtime.networked import Networked
from halos.runtime.parent import ParentLink
from halos.runtime.plan import RunPlan
from halos.runtime.prepare import (
    outer_settings,
    prepare_data,
    prepare_model,
    roundings_of,
    server_settings,
)
from halos.runtime.repeats import RefusalLog
from halos.runtime.serving import Answers, Observation, Serving
from halos.runtime.telemetry import server_telemetry
from halos.runtime.trace import RunFacts, TraceWriter, open_trace
from halos.specification import RunSpecification
from halos.training.constants import constants_blob
from halos.training.corpus import Progress
from halos.wire.chunks import layout_from, layout_shape
from halos.wire.frames import (
    NEWEST_PROTOCOL,
    DatasetShape,
    Evaluation,
    Greeting,
    Hello,
    Observe,
    Observed,
)
from halos.wire.security import Security

log = logging.getLogger(__name__)

CURVE_POINTS = 200  # of the newest evaluations are told
TELL_S = 1.0  # between two reports of a region to its parent
LINGER_S = 20.0  # at the end, for children to hear of it
ASKED_S = 5.0  # who asked for the status so lately looks on, and is to see the end
EVALUATION_S = 120.0  # at the end, for an observer's last word
WATCH_S = 0.1
"""Between two looks for a model that an observer waits for."""


@dataclass
class ServerProcess:
    """Ready to :meth:`run`. ``link`` leads to the parent; the coordinator has none."""

    name: NodeId
    specification: RunSpecification
    driver: Networked
    loop: LoopThread
    children: Children
    keeping: Keeping
    about: Mapping[str, Any]
    """What a snapshot says besides: what the model and the specification are."""

    total_samples: int | None

    link: ParentLink | None = None
    serving: Serving | None = None
    metrics: RunMetrics = field(default_factory=RunMetrics)
    earlier_s: float = 0.0  # that earlier starts ran
    evaluations: list[Evaluation] = field(default_factory=list)
    on_evaluation: Callable[[Evaluation], None] | None = None
    last_word: bool = False  # of an observer, on the finished model
    asked_at: float = float("-inf")  # when somebody last asked for the status

    @property
    def server(self) -> Server:
        server = self.driver.nodes[self.name]
        assert isinstance(server, Server)
        return server

    @property
    def elapsed_s(self) -> float:
        """Since the run began, as far as it was kept."""
        return self.earlier_s + self.driver.now

    @property
    def address(self) -> str:
        assert self.serving is not None
        return self.serving.address

    def run(self, tick: Callable[[], None] | None = None) -> bool:
        """Serve until the run is over or :meth:`Networked.stop`; then save. Whether it is over."""
        told = 0.0

        def look() -> None:
            nonlocal told
            self.keeping.save_if_due(self.capture)
            if self.link is not None and time.monotonic() >= told + TELL_S:
                told = time.monotonic()
                self.link.tell(json.dumps(self.telemetry()))
            if tick is not None:
                tick()

        finished = self.driver.run(tick=look)
        if finished:
            self._linger()
        return finished

    def save(self) -> Path:
        return self.keeping.save(self.capture)

    def capture(self) -> Capture:
        """The server's state between two events; sessions and members come again by themselves."""
        nodes = {self.name: self.server}

        def take() -> Capture:
            return capture(self.driver, 0, {}, nodes)

        state: Capture = self.driver.between_events(take).result()
        manifest = {**self.about, **state.manifest, "now": self.elapsed_s}
        return replace(state, manifest=manifest)

    def telemetry(self) -> dict[str, Any]:
        return server_telemetry(
            self.server, self.metrics, self.driver, self.children, self.link, self.elapsed_s
        )

    def status(self) -> dict[str, Any]:
        """What people ask for: this process, those below it, and how many there should be."""
        self.asked_at = time.monotonic()
        workers = Counter(worker.parent for worker in self.specification.topology.workers)
        servers = [server.name for server in self.specification.topology.servers]
        return self.telemetry() | {
            "run": self.specification.run.name,
            "total": self.total_samples,
            "expected": {n: workers[n] for n in servers if n != ROOT or workers[n]},
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations[-CURVE_POINTS:]],
        }

    def _linger(self) -> None:
        """Let children hear that the run is over, and an observer say its last word."""
        over = time.monotonic()
        while self.children.here() and time.monotonic() < over + LINGER_S:
            time.sleep(WATCH_S)
        watched = self.asked_at > over - ASKED_S
        while watched and self.asked_at < over and time.monotonic() < over + ASKED_S:
            time.sleep(WATCH_S)
        ends = time.monotonic() + EVALUATION_S
        while self.children.observers() and not self.last_word and time.monotonic() < ends:
            time.sleep(WATCH_S)
        if self.link is not None:
            self.link.stop()  # who waits for us waits no longer

    async def observe(self, request: Observe) -> Observation:
        """The root's model once it is newer than what was seen, or the run is over."""
        while request.wait and not self._news(request) and not self.driver.finished:
            await asyncio.sleep(WATCH_S)
        finished = self.driver.finished
        return await asyncio.wrap_future(
            self.driver.between_events(lambda: self._observation(request, finished))
        )

    def _observation(self, request: Observe, finished: bool) -> Observation:
        state, tensors = self.server.state, self.server.tensors
        about = Observed(
            version=state.version,
            local_steps=state.reported.local_steps,
            tokens=state.reported.tokens,
            elapsed_s=self.elapsed_s,
            finished=finished,
        )
        assert isinstance(tensors, TorchState)
        return Observation(about, tensors.publish() if self._news(request) or finished else None)

    def _news(self, request: Observe) -> bool:
        return request.after is None or self.server.state.version > request.after

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        self.last_word = self.driver.finished and evaluation.version == self.server.state.version
        if self.on_evaluation is not None:
            self.on_evaluation(evaluation)


@dataclass(frozen=True)
class Told:
    """What a server process needs to know of its run, from the specification or from its parent."""

    specification: RunSpecification
    greeting: Greeting
    layout: ModelLayout
    constants: bytes
    start: Fragments | None = None  # the first model, at the root

    @property
    def identity(self) -> Identity:
        return Identity(
            run=self.greeting.run,
            model=self.layout.hash,
            datasets=tuple(dataset.identity for dataset in self.greeting.datasets),
        )

    def facts(self, name: NodeId) -> dict[str, Any]:
        """What may not change while a directory's state is gone on with."""
        topology = self.specification.topology
        return {
            "[run] name": self.greeting.run,
            "[run] seed": self.specification.run.seed,
            "[model]": self.layout.hash,
            "[data]": list(self.identity.datasets),
            "[training] length": self.greeting.datasets[0].samples,
            "[[regions]] and workers": {s.name: s.parent for s in topology.servers}
            | {w.name: w.parent for w in topology.workers},
            "role": name,
        }


def told_by(
    specification: RunSpecification, progress: Progress | None = None
) -> tuple[Told, Mapping[str, Any]]:
    """What the coordinator knows of its own run, and what its snapshots say besides.

    Raises ``UserError``; ``progress`` hears of long work.
    """
    data, model = prepare_data(specification, progress), prepare_model(specification)
    samples = specification.total_samples(data.samples)
    greeting = Greeting(
        protocol=NEWEST_PROTOCOL,
        features=(),
        run=specification.run.name,
        specification_version=1,
        specification=_anywhere(specification).model_dump_json(by_alias=True),
        layout=layout_shape(model.layout),
        datasets=(DatasetShape(data.name, samples),),
        server=ROOT,
        name="",
    )
    constants = constants_blob(model.module) if greeting.layout.constants else b""
    about = {
        "model": model.settings.model_dump(mode="json"),
        "specification": specification.model_dump(mode="json", by_alias=True),
    }
    return Told(specification, greeting, model.layout, constants, model.start()), about


def _anywhere(specification: RunSpecification) -> RunSpecification:
    """With paths that mean the same in whatever folder another process was started."""
    data = specification.data
    paths = {name: getattr(data, name) for name in ("train", "validation")}
    resolved = {name: path.resolve() for name, path in paths.items() if path is not None}
    return specification.model_copy(update={"data": data.model_copy(update=resolved)})


@contextmanager
def coordinator(
    told: Told,
    about: Mapping[str, Any],
    listen: str,
    security: Security,
    *,
    trace: Path | None = None,
) -> Iterator[ServerProcess]:
    """The root, listening. Goes on with the run that its directory holds."""
    folder = told.specification.run.directory
    with ExitStack() as stack:
        loop = LoopThread()
        stack.callback(loop.close)
        yield _open(
            stack, loop, told, ServerPlace(ROOT, None), None, folder, about, listen, security, trace
        )


@contextmanager
def region(
    name: str,
    parent: str,
    listen: str,
    security: Security,
    *,
    directory: Path | None = None,
    trace: Path | None = None,
) -> Iterator[ServerProcess]:
    """A region's server, listening; ``parent`` is an address. Waits for the parent to be there."""
    with ExitStack() as stack:
        loop = LoopThread()
        stack.callback(loop.close)
        link = ParentLink(loop, parent, security, Hello("server", name))
        stack.callback(link.stop)
        greeting = loop.run(link.greet())
        specification = RunSpecification.model_validate_json(greeting.specification)
        layout = layout_from(greeting.layout)
        constants = loop.run(link.constants()) if greeting.layout.constants else b""
        told = Told(specification, greeting, layout, constants)
        folder = directory or Path("runs", greeting.run, "servers", name)
        place = ServerPlace(greeting.name, greeting.server)
        yield _open(stack, loop, told, place, link, folder, {}, listen, security, trace)


def _open(
    stack: ExitStack,
    loop: LoopThread,
    told: Told,
    place: ServerPlace,
    link: ParentLink | None,
    folder: Path,
    about: Mapping[str, Any],
    listen: str,
    security: Security,
    trace: Path | None,
) -> ServerProcess:
    specification = told.specification
    checkpoint = specification.checkpoint
    keeping = stack.enter_context(
        kept_in(folder, told.facts(place.name), every_s=checkpoint.every_s, keep=checkpoint.keep)
    )
    saved = keeping.saved()
    driver = _driver(told, place, keeping.starts, saved)
    stack.callback(driver.close)
    codecs = specification.resolved_wire.codecs
    children = Children(loop, told.layout, driver.from_child, codecs)
    process = ServerProcess(
        place.name, specification, driver, loop, children, keeping, about,
        told.greeting.datasets[0].samples, link,
        earlier_s=saved.manifest["now"] if saved is not None else 0.0,
    )  # fmt: skip
    driver.children, driver.parent = children, link
    driver.observers += [process.metrics, RefusalLog()]
    if trace is not None:
        file = stack.enter_context(open_trace(trace))
        driver.observers.append(TraceWriter(file, _facts(told, place)))
    answers = Answers(
        replace(told.greeting, server=place.name, name=""),
        specification.topology,
        told.constants,
        process.status,
        process.observe if link is None else None,
        process.evaluated if link is None else None,
    )
    process.serving = Serving(children, security, answers)
    driver.begin()
    loop.run(process.serving.start(listen))
    stack.callback(lambda: loop.run(process.serving.stop()) if process.serving else None)
    if link is not None:
        link.start(codecs, driver.from_parent, driver.parent_lost, driver.fail)
    return process


def _facts(told: Told, place: ServerPlace) -> RunFacts:
    return RunFacts(
        run=told.identity.run,
        model=told.identity.model,
        datasets=told.identity.datasets,
        seed=told.specification.run.seed,
        servers={place.name: place.parent},
        workers={},
        membership=told.specification.membership,
        apart=True,
    )


def _driver(told: Told, place: ServerPlace, starts: int, saved: Capture | None) -> Networked:
    specification, name = told.specification, place.name
    outer, links = outer_settings(specification, name), roundings_of(specification)
    restored = Restored(saved) if saved is not None else None
    plan = RunPlan(
        topology=specification.topology,
        identity=told.identity,
        membership=specification.membership,
        samples={dataset.identity: dataset.samples for dataset in told.greeting.datasets},
        server_settings=lambda _: server_settings(specification),
        tensors=lambda _: (
            restored.server_tensors(name, outer, links)
            if restored is not None
            else TorchState.start(
                told.start or zeros(told.layout), outer, links, has_parent=place.parent is not None
            )
        ),
        apart=True,
    )
    nodes = plan.server_nodes(place)
    if restored is not None:
        nodes = plan.server_nodes(place, restored.node_states({name: nodes[name]}))
    return Networked(name, nodes, parent_name=place.parent, epoch=starts)
