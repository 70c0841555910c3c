"""A recorded run, lived through again event by event.

The order of events and the clock are those of the traces; training and all arithmetic are done
anew. When every line comes out as it was recorded, checksums of tensors included, the driver that
recorded it added no arithmetic of its own.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halos.core.messages import (
    Event,
    Finish,
    LocalStepsDone,
    Node,
    NodeId,
    RunLocalSteps,
)
from halos.errors import UserError
from halos.runtime.dispatcher import Dispatcher, Pending, Step, Trainer
from halos.runtime.mail import Mail, first_difference, text_of
from halos.runtime.trace import Describer, Trace, TraceLine
from halos.runtime.virtual import untrained
from halos.store.encoding import PayloadReader, decoder
from halos.wire.roundtrip import RoundTrip

Fresh = Callable[[NodeId], tuple[Node, Trainer | None]]
SHOWN = 300  # characters of a value in an error
GONE_ON = (
    "; its process was started again before that, perhaps from a saved state, "
    "which is no part of a trace"
)


class ReplayDiffers(ValueError):  # noqa: N818  it is a finding, and may be what was looked for
    """What came out here is not what was recorded: the first difference, and where."""

    def __init__(self, line: TraceLine, field: str, recorded: Any, came: Any) -> None:
        super().__init__(
            f"{line.where}: node {line.node}: {field} was recorded as {_short(recorded)}, "
            f"and is {_short(came)} when replayed" + (GONE_ON * (line.start > 1))
        )
        self.where, self.node = line.where, line.node
        self.field, self.recorded, self.came = field, recorded, came


@dataclass(frozen=True)
class Replayed:
    """How far a replay came, without any difference.

    ``finished``: the root came to the end of the run. ``waiting``: the first line of each node
    that could not be replayed, since what it waits for was sent by a process whose trace ends too
    early; empty when all lines were. ``lost``: messages of each sender that never arrived although
    later ones did; where no link was lost, they are lines that the trace lacks.
    """

    events: int
    rounds: int
    finished: bool
    waiting: Mapping[NodeId, TraceLine]
    lost: Mapping[NodeId, int]

    @property
    def complete(self) -> bool:
        return not self.waiting


@dataclass(frozen=True, slots=True)
class _Head:
    """The next line of a node."""

    line: TraceLine
    content: dict[str, Any]

    @property
    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = self.content["event"]
        return event


class Replay(Dispatcher):
    """Feeds each node its recorded events in its recorded order.

    Between nodes any order is right in which nothing arrives before it was sent. ``undo`` has a
    worker's trainer forget the round of a lease: without it, rounds that were taken away amid
    training must not have moved its moments. ``fresh`` makes a node, and its trainer if it has one,
    that was started again from nothing; without it, that is an error.
    """

    def __init__(
        self,
        nodes: dict[NodeId, Node],
        trainers: dict[NodeId, Trainer],
        traces: Sequence[Trace],
        *,
        isolate: RoundTrip | None = None,
        undo: Callable[[NodeId, str], None] | None = None,
        fresh: Fresh | None = None,
    ) -> None:
        """Raises ``UserError`` if the traces tell of a node that is not among ``nodes``."""
        super().__init__(nodes, trainers, isolate=isolate or RoundTrip())
        self.undo = undo
        self.fresh = fresh
        self.events = self.rounds = 0
        self._now = 0.0
        self._left: dict[NodeId, deque[TraceLine]] = defaultdict(deque)
        for trace in traces:
            for line in trace.lines:
                if line.node not in nodes:
                    raise UserError(f"{line.where}: node {line.node} is not one of this run")
                self._left[line.node].append(line)
        self._heads: dict[NodeId, _Head] = {}
        self._mail = Mail()
        self._jobs: dict[NodeId, list[RunLocalSteps]] = defaultdict(list)
        self._awake = dict.fromkeys(self._left)
        self._started: set[NodeId] = set()
        self._over: set[NodeId] = set()  # nodes that have nothing more to do
        self._current: _Head | None = None
        self._describer = Describer()
        self._decode = decoder(PayloadReader({}))
        self.observers.append(self._compare)

    @property
    def now(self) -> float:
        """The recorded time of the last event."""
        return self._now

    def run(self) -> Replayed:
        """Replay all lines, or as many as a trace that was cut off allows.

        Raises :class:`ReplayDiffers` at the first difference.
        """
        while not self.stopping.is_set():
            if self._awake:
                self._feed_all(next(iter(self._awake)))
            elif not self._admit():
                break
        waiting = {name: head.line for name in self._left if (head := self._head(name))}
        if waiting and not self.stopping.is_set():
            self._check_that_a_trace_was_cut_off()
        return Replayed(self.events, self.rounds, self.finished, waiting, self._mail.overtaken())

    # ------------------------------------------------------------ events, as recorded

    def _head(self, name: NodeId) -> _Head | None:
        if name not in self._heads and self._left.get(name):
            line = self._left[name].popleft()
            self._heads[name] = _Head(line, line.content)
        return self._heads.get(name)

    def _feed_all(self, name: NodeId) -> None:
        """Let a node handle its next events for as long as they have come."""
        del self._awake[name]
        while (head := self._head(name)) and (event := self._come(name, head)):
            self._feed(name, head, event)
        self._awake.pop(name, None)

    def _feed(self, name: NodeId, head: _Head, event: Event) -> None:
        del self._heads[name]
        self._now, self._current = head.content["time"], head
        self.dispatch(name, event, self._now)
        self.events += 1

    def _come(self, name: NodeId, head: _Head) -> Event | None:
        """The event of this line, unless it still has to come."""
        if name not in self._started and head.event["type"] != "Started":
            raise UserError(
                f"{head.line.where}: node {name} has not been started; give the trace from the "
                "beginning of its run"
            )
        match head.event["type"]:
            case "Received" | "Told":
                return self._mail.take(name, head.event)
            case "LocalStepsDone":
                return self._trained(name, head.event)
            case "Started":
                self._start_again_if_started(name, head)
        return self._structured(head)

    def _structured(self, head: _Head) -> Event:
        event: Event = self._decode.structure(head.event, Event)  # type: ignore[arg-type]
        return event

    def _start_again_if_started(self, name: NodeId, head: _Head) -> None:
        if name not in self._started:
            self._started.add(name)
            return
        if self.fresh is None:
            raise UserError(
                f"{head.line.where}: node {name} was started again; give the trace up to there, "
                "since what it went on from is not part of a trace"
            )
        self.nodes[name], trainer = self.fresh(name)
        self._abandon(name)
        if trainer is not None:
            self.trainers[name] = trainer

    def _admit(self) -> bool:
        """Take an event that nobody here can send as come from outside, when nothing else is left.

        It is of an operator, or of somebody who was not let in.
        """
        for name in self._left:
            head = self._head(name)
            if head is None or not self._is_from_outside(head.event):
                continue
            try:
                event = self._structured(head)
            except Exception as error:
                raise UserError(
                    f"{head.line.where}: node {name} received tensors from "
                    f"{head.event.get('sender')}, which is not one of this run"
                ) from error
            self._feed(name, head, event)
            self._awake[name] = None
            return True
        return False

    def _is_from_outside(self, event: dict[str, Any]) -> bool:
        if event["type"] == "Received":
            return event["sender"] not in self.nodes
        is_notice: bool = event["type"] == "Told"
        return is_notice and event["notice"]["type"] == "RaiseFence"

    def _trained(self, worker: NodeId, recorded: dict[str, Any]) -> LocalStepsDone | None:
        """The result of the round of the recorded lease, if that was ordered."""
        jobs = self._jobs[worker]
        numbers = [i for i, job in enumerate(jobs) if job.lease.id == recorded["lease"]]
        if not numbers:
            return None
        given_up, job = jobs[: numbers[-1]], jobs[numbers[-1]]
        del jobs[: numbers[-1] + 1]
        done = self._round(worker, job, recorded)
        if given_up and self.undo is not None and not self._equal(done, recorded):
            # A round that is taken away may be trained to its end all the same, for its moments.
            self.undo(worker, job.lease.id)
            for taken_away in given_up:
                self.trainers[worker](taken_away)
            done = self._round(worker, job, recorded)
        self.rounds += 1
        return done

    def _round(
        self, worker: NodeId, job: RunLocalSteps, recorded: dict[str, Any]
    ) -> LocalStepsDone:
        done = self.trainers.get(worker, untrained)(job)
        return replace(done, seconds=recorded["seconds"])

    def _equal(self, event: Event, recorded: dict[str, Any]) -> bool:
        return text_of(self._describer.event(event)) == text_of(recorded)

    # ------------------------------------------------------------ effects, compared

    def _post(self, delay_s: float, node: NodeId, event: Event) -> None:
        self._mail.put(node, event, self._describer.event(event))
        self._awake[node] = None

    def _train(self, worker: NodeId, job: RunLocalSteps) -> None:
        self._jobs[worker].append(job)

    def _abandon(self, worker: NodeId) -> None:
        self._jobs.pop(worker, None)

    def _compare(self, step: Step) -> None:
        """The line that this step gives must be the recorded one."""
        assert self._current is not None
        if any(isinstance(effect, Finish) for effect in step.effects):
            self._over.add(step.node)
        recorded, came = self._current.content, self._describer.line(step)
        if text_of(recorded) != text_of(came):
            raise ReplayDiffers(self._current.line, *first_difference(recorded, came))

    # ------------------------------------------------------------ when nothing more can come

    def _check_that_a_trace_was_cut_off(self) -> None:
        """Every node must wait, if for others that wait, for one whose trace ended too early."""
        for name in self._left:
            chain: dict[NodeId, None] = {}
            at = name
            while (head := self._head(at)) and at not in chain:
                chain[at] = None
                at = self._awaited(at, head.event)
            if not chain:
                continue
            if head is not None:  # in a circle: each has recorded what comes after
                circle = list(chain)[list(chain).index(at) :]
                self._raise_difference(circle)
            *_, last = chain
            if at in self._over or self._alike(last):
                self._raise_difference([last])

    def _awaited(self, name: NodeId, event: dict[str, Any]) -> NodeId:
        """Whose doing a node waits for; itself, if nobody else's."""
        match event["type"]:
            case "Received":
                sender: NodeId = event["sender"]
                return sender
            case "Told":
                process = name.partition(".")[0]
                beside = [n for n in self.nodes if n != name and n.partition(".")[0] == process]
                blocked = [n for n in beside if self._head(n)]
                return next(iter(blocked or beside), name)
            case _:
                return name

    def _alike(self, name: NodeId) -> dict[str, Any] | None:
        """What waits for this node in place of what it recorded next."""
        head = self._heads[name]
        return self._mail.alike(name, head.event)

    def _raise_difference(self, blocked: Sequence[NodeId]) -> None:
        name = next((name for name in blocked if self._alike(name)), blocked[0])
        head, alike = self._heads[name], self._alike(name)
        if alike is not None:
            raise ReplayDiffers(head.line, *first_difference(head.event, alike, "event"))
        raise ReplayDiffers(head.line, "event", head.event, None)

    # ------------------------------------------------------------ what a driver has to offer

    def under_way(self) -> list[Pending]:
        raise NotImplementedError("a replay cannot be captured")

    def restore(self, pending: list[Pending]) -> None:
        raise NotImplementedError("a replay is of a run from its beginning")


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
