"""The virtual clock: events in order of modelled time; same seed, same trace, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from heapq import heapify, heappop, heappush

from halos.core.frozen import frozen
from halos.core.messages import (
    DeadlineReached,
    Event,
    LocalStepsDone,
    Message,
    Node,
    NodeId,
    Received,
    RunLocalSteps,
)
from halos.core.tensors import NOTHING
from halos.errors import Interrupted
from halos.runtime.dispatcher import Dispatcher, Pending, RoundEnds, Trainer
from halos.runtime.timing import TimeModel
from halos.wire.roundtrip import RoundTrip


def untrained(job: RunLocalSteps, seconds: float = 0.0) -> LocalStepsDone:
    """The trainer of timing-only simulation."""
    lease = job.lease
    # By position, as everything that is made once a round: by name takes three times as long.
    return LocalStepsDone(lease.id, job.local_steps, lease.samples, 0.0, 0.0, seconds, NOTHING)


@frozen
class _Round:
    """What a worker trains: only one at a time, as its trainer can do no more."""

    job: RunLocalSteps
    seconds: float
    future: Future[LocalStepsDone] | None


class VirtualClock(Dispatcher):
    """Drives nodes through modelled time.

    With ``threads`` the rounds of different workers are computed side by side while the order of
    events, and with it every number, stays that of the model. Then a round that is taken away may
    have been computed already: ``undo`` has the worker's trainer forget that lease.
    """

    def __init__(
        self,
        nodes: dict[NodeId, Node],
        model: TimeModel,
        trainers: dict[NodeId, Trainer] | None = None,
        *,
        isolate: RoundTrip | None = None,
        threads: int = 0,
        undo: Mapping[NodeId, Callable[[str], None]] | None = None,
        now: float = 0.0,
        sequence: int = 0,
    ) -> None:
        super().__init__(nodes, trainers or {}, isolate=isolate)
        self._now = now
        self.sequence = sequence
        self.model = model
        self._heap: list[tuple[float, int, NodeId, Event | _Round]] = []
        self._deadlines: dict[NodeId, float] = {}
        self.undo = undo or {}
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._rounds: dict[NodeId, _Round] = {}

    @property
    def now(self) -> float:
        return self._now

    @property
    def next_at(self) -> float:
        """When the next event is due; infinite when nothing is left to happen."""
        return self._heap[0][0] if self._heap else math.inf

    def run(self, *, until: float | None = None, events: int | None = None) -> bool:
        """Handle events until the root finishes, a limit is reached or :meth:`stop` is called.

        When all that was to happen by ``until`` has happened, it is that time. Returns whether the
        run is over; ``False`` also when nothing is left to happen.
        """
        handled, limit = 0, math.inf if until is None else until
        while not self.finished and not self.stopping.is_set():
            if not self._heap or self._heap[0][0] > limit:
                if until is not None:
                    self._now = max(self._now, until)
                break
            if handled == events:
                break
            self.step()
            handled += 1
        return self.finished

    def step(self) -> None:
        """Handle the next event."""
        time, sequence, name, event = heappop(self._heap)
        if isinstance(event, _Round):
            if self._is_abandoned(name, event):
                return
            try:
                event = self._result(name, event)
            except Interrupted:
                heappush(self._heap, (time, sequence, name, event))
                return
        elif isinstance(event, DeadlineReached):
            if self._deadlines.get(name) != time:
                return  # the node has since asked for another time
            del self._deadlines[name]
        self._now = time
        self.dispatch(name, event, time)
        node = self.nodes.get(name)
        deadline = node.next_deadline() if node is not None else None
        if deadline is not None or name in self._deadlines:
            self._set_deadline(name, deadline)

    def close(self) -> None:
        """End the threads, abandoning what they compute."""
        self.stopping.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def under_way(self) -> list[Pending]:
        pending: list[Pending] = []
        for time, sequence, name, event in sorted(self._heap, key=_order):
            if isinstance(event, _Round):
                if not self._is_abandoned(name, event):
                    pending.append(Pending(time, sequence, name, RoundEnds(event.job)))
            elif not isinstance(event, DeadlineReached) or self._deadlines.get(name) == time:
                pending.append(Pending(time, sequence, name, event))
        return pending

    def restore(self, pending: list[Pending]) -> None:
        self._heap = []
        for entry in pending:
            event: Event | _Round
            if isinstance(entry.event, RoundEnds):
                event = self._begin(entry.node, entry.event.job)
            else:
                event = entry.event
                if isinstance(event, DeadlineReached):
                    self._deadlines[entry.node] = entry.time
            self._heap.append((entry.time, entry.sequence, entry.node, event))
        heapify(self._heap)

    def _post(self, delay_s: float, node: NodeId, event: Event | _Round) -> None:
        self.sequence += 1
        heappush(self._heap, (self._now + delay_s, self.sequence, node, event))

    def _deliver(self, sender: NodeId, to: NodeId, message: Message) -> None:
        self._post(self.model.transfer_s(sender, to, message), to, Received(sender, message))

    def _train(self, worker: NodeId, job: RunLocalSteps) -> None:
        if worker in self._rounds:
            self._undo_round(worker)
        training = self._begin(worker, job)
        self._post(training.seconds, worker, training)

    def _begin(self, worker: NodeId, job: RunLocalSteps) -> _Round:
        future = None
        if self._pool is not None and worker in self.trainers:
            future = self._pool.submit(self.trainers[worker], job)
        seconds = self.model.compute_s(worker, job.local_steps, self._now)
        training = self._rounds[worker] = _Round(job, seconds, future)
        return training

    def _result(self, worker: NodeId, training: _Round) -> LocalStepsDone:
        trainer = self.trainers.get(worker)
        if trainer is None:
            done = untrained(training.job, training.seconds)
        else:
            done = training.future.result() if training.future else trainer(training.job)
            # Time is modelled here, and two runs of the same seed have the same trace.
            done = replace(done, seconds=training.seconds)
        del self._rounds[worker]
        return done

    def _undo_round(self, worker: NodeId) -> None:
        """A round that is taken away never was, however far its computation has come."""
        given_up = self._rounds.pop(worker, None)
        if given_up is None or given_up.future is None or given_up.future.cancel():
            return
        wait([given_up.future])
        if worker in self.undo:
            self.undo[worker](given_up.job.lease.id)

    def _is_abandoned(self, worker: NodeId, training: _Round) -> bool:
        return self._rounds.get(worker) is not training

    def _abandon(self, worker: NodeId) -> None:
        self._undo_round(worker)
        self._deadlines.pop(worker, None)
        self._heap = [entry for entry in self._heap if entry[2] != worker]
        heapify(self._heap)

    def _set_deadline(self, name: NodeId, deadline: float | None) -> None:
        if deadline is None:
            del self._deadlines[name]
        elif self._deadlines.get(name) != max(deadline, self._now):
            self.sequence += 1
            time = max(deadline, self._now)
            self._deadlines[name] = time
            heappush(self._heap, (time, self.sequence, name, DeadlineReached()))


def _order(entry: tuple[float, int, NodeId, Event | _Round]) -> tuple[float, int]:
    return entry[0], entry[1]
