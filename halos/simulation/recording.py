"""What a simulated run of servers is measured by, gathered step by step in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from halos.core.messages import (
    Assignment,
    Effect,
    LocalStepsDone,
    Message,
    NodeId,
    Received,
    RunLocalSteps,
    Send,
    Started,
    WorkerUpdate,
)
from halos.core.server import Server
from halos.core.topology import ROOT
from halos.core.worker import Worker
from halos.runtime.dispatcher import Step
from halos.runtime.trace import staleness
from halos.simulation.outcome import Activity, Span

MAX_LANES = 64
ENDS_ROUND = (LocalStepsDone, Started)  # a worker that starts had died meanwhile


class Recorder:
    """An observer of a driver's steps that keeps sums, and nothing of any message.

    ``size_bytes(sender, to, message)`` says what a message weighs between sites, and 0 within one.
    Sessions and memberships are left out: what they send weighs nothing beside a model.
    ``window_s``: how much of the beginning the lanes show, of the first ``MAX_LANES`` of
    ``workers``; ``None`` keeps no lanes.
    """

    def __init__(
        self,
        workers: Sequence[NodeId],
        size_bytes: Callable[[NodeId, NodeId, Message], int],
        window_s: float | None,
    ) -> None:
        self.wide_area_bytes = 0  # that arrived
        self.max_staleness: int | None = None
        self._workers = len(workers)
        self._size_bytes = size_bytes
        self._lanes = Lanes(workers[:MAX_LANES], window_s or 0.0)
        self._computed_s = 0.0  # in rounds that have ended
        self._began: dict[NodeId, float] = {}  # rounds under way
        self._root_version: int | None = None
        self._applied = self._staleness = 0  # at the root; their staleness in sum

    def __call__(self, step: Step) -> None:
        subject, event = step.subject, step.event
        if isinstance(subject, Worker):
            self._of_worker(step)
        elif not isinstance(subject, Server):
            return
        elif step.node == ROOT:
            self._of_root(step, subject.state.version)
        if isinstance(event, Received):
            self.wide_area_bytes += self._size_bytes(event.sender, step.node, event.message)
        if step.time < self._lanes.window_s:
            self._lanes.note(step)

    def ended(self, worker: NodeId, now: float) -> None:
        """The worker's process ended without a word: no event says so."""
        self._end_round(worker, now)
        self._lanes.end(worker, now)

    def utilization(self, now: float) -> float:
        """Share of all workers' time up to ``now`` that they computed."""
        under_way = sum(now - began for began in self._began.values())
        time_s = self._workers * now
        return (self._computed_s + under_way) / time_s if time_s else 0.0

    @property
    def mean_staleness(self) -> float | None:
        """Of what was applied at the root, in its versions; ``None`` if nothing was."""
        return self._staleness / self._applied if self._applied else None

    def lanes(self, now: float) -> dict[NodeId, tuple[Span, ...]]:
        """What each worker did in the window, up to ``now``."""
        return self._lanes.up_to(now)

    def _of_worker(self, step: Step) -> None:
        if isinstance(step.event, ENDS_ROUND):
            self._end_round(step.node, step.time)
        for effect in step.effects:
            if isinstance(effect, RunLocalSteps):
                self._end_round(step.node, step.time)  # that was given up for this one
                self._began[step.node] = step.time

    def _end_round(self, worker: NodeId, now: float) -> None:
        began = self._began.pop(worker, None)
        if began is not None:
            self._computed_s += now - began

    def _of_root(self, step: Step, version: int) -> None:
        """What is refused, or repeated, leaves the version as it was."""
        known, self._root_version = self._root_version, version
        if version == known or known is None:
            return
        stale = staleness(step)
        if stale is None:
            return  # a root that started from an older state
        self._applied += 1
        self._staleness += stale
        self.max_staleness = max(stale, self.max_staleness or 0)


class Lanes:
    """Who of ``workers`` computes, sends and waits, over the first ``window_s`` seconds.

    A worker sends while its update, or the assignment for it, is under way; it waits while its
    server has nothing for it, and while it has nothing to send.
    """

    def __init__(self, workers: Iterable[NodeId], window_s: float) -> None:
        self.window_s = window_s
        self._spans: dict[NodeId, list[Span]] = {worker: [] for worker in workers}
        self._now: dict[NodeId, tuple[float, Activity]] = {}  # since when

    def note(self, step: Step) -> None:
        if isinstance(step.subject, Worker):
            if step.node in self._spans:
                self._of_worker(step)
            return
        if isinstance(step.event, Received) and isinstance(step.event.message, WorkerUpdate):
            self._elsewhere(step.event.sender, step.time, "wait")
        for effect in step.effects:
            if isinstance(effect, Send) and isinstance(effect.message, Assignment):
                self._elsewhere(effect.to, step.time, "send")

    def end(self, worker: NodeId, now: float) -> None:
        """The worker is not there any more."""
        if worker in self._now:
            self._spans[worker] = self._with_open(worker, now)
            del self._now[worker]

    def up_to(self, now: float) -> dict[NodeId, tuple[Span, ...]]:
        return {worker: tuple(self._with_open(worker, now)) for worker in self._spans}

    def _of_worker(self, step: Step) -> None:
        done = isinstance(step.event, LocalStepsDone)
        if isinstance(step.event, Started):
            self._change(step.node, step.time, "wait")
        elif any(isinstance(effect, RunLocalSteps) for effect in step.effects):
            self._change(step.node, step.time, "compute")
        elif any(_sends_update(effect) for effect in step.effects):
            self._change(step.node, step.time, "send")
        elif done and self._now.get(step.node, (0.0, "wait"))[1] == "compute":
            self._change(step.node, step.time, "wait")  # its server is away

    def _elsewhere(self, worker: NodeId, now: float, activity: Activity) -> None:
        """A server did its part; a worker that computes does so whatever comes a second time."""
        if worker in self._now and self._now[worker][1] != "compute":
            self._change(worker, now, activity)

    def _change(self, worker: NodeId, now: float, activity: Activity) -> None:
        self._spans[worker] = self._with_open(worker, now)
        self._now[worker] = now, activity

    def _with_open(self, worker: NodeId, now: float) -> list[Span]:
        """The worker's spans with what it does now, up to ``now``; one activity is one span."""
        spans = self._spans[worker]
        if worker not in self._now:
            return spans
        since, activity = self._now[worker]
        end = min(now, self.window_s)
        if since >= end:
            return spans
        if spans and spans[-1].end_s == since and spans[-1].activity == activity:
            return [*spans[:-1], Span(spans[-1].start_s, end, activity)]
        return [*spans, Span(since, end, activity)]


def _sends_update(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, WorkerUpdate)
