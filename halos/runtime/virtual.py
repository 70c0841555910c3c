"""The virtual clock: events in order of modelled time; same seed, same trace, bit for bit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from halos.core.frozen import frozen
from halos.core.messages import (
    DeadlineReached,
    Event,
    LocalStepsDone,
    Message,
    Node,
    NodeId,
    RunLocalSteps,
)
from halos.core.tensors import NOTHING
from halos.errors import Interrupted
from halos.runtime.dispatcher import Dispatcher, Pending, RoundEnds, Trainer
from halos.runtime.timing import TimeModel
from halos.wire.roundtrip import RoundTrip


def untrained(job: RunLocalSteps, seconds: float = 0.0) -> LocalStepsDone:
    """The trainer of timing-only simulation."""
    return LocalStepsDone(
        lease=job.lease.id,
        local_steps=job.local_steps,
        tokens=job.lease.samples,
        loss=0.0,
        norm=0.0,
        seconds=seconds,
        payload=NOTHING,
    )


@frozen
class _Round:
    """What a worker trains: only one at a time, as its trainer can do no more."""

    sequence: int
    lease: str
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
        self._heap: list[tuple[float, int, NodeId, Event | RoundEnds]] = []
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
        time, sequence, name, event = heapq.heappop(self._heap)
        if isinstance(event, RoundEnds):
            if self._is_abandoned(name, sequence):
                return
            try:
                event = self._result(name, event.job)
            except Interrupted:
                heapq.heappush(self._heap, (time, sequence, name, event))
                return
        elif isinstance(event, DeadlineReached):
            if self._deadlines.get(name) != time:
                return  # the node has since asked for another time
            del self._deadlines[name]
        self._now = time
        self.dispatch(name, event, time)
        self._ask_deadline(name)

    def close(self) -> None:
        """End the threads, abandoning what they compute."""
        self.stopping.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def under_way(self) -> list[Pending]:
        return [
            Pending(time, sequence, name, event)
            for time, sequence, name, event in sorted(self._heap, key=_order)
            if not (isinstance(event, RoundEnds) and self._is_abandoned(name, sequence))
            and not (isinstance(event, DeadlineReached) and self._deadlines.get(name) != time)
        ]

    def restore(self, pending: list[Pending]) -> None:
        self._heap = [(p.time, p.sequence, p.node, p.event) for p in pending]
        heapq.heapify(self._heap)
        for entry in pending:
            if isinstance(entry.event, RoundEnds):
                job = entry.event.job
                seconds = self.model.compute_s(entry.node, job.local_steps, self._now)
                self._submit(entry.sequence, entry.node, job, seconds)
            elif isinstance(entry.event, DeadlineReached):
                self._deadlines[entry.node] = entry.time

    def _post(self, delay_s: float, node: NodeId, event: Event | RoundEnds) -> None:
        self.sequence += 1
        heapq.heappush(self._heap, (self._now + delay_s, self.sequence, node, event))

    def _train(self, worker: NodeId, job: RunLocalSteps) -> None:
        self._undo_round(worker)
        seconds = self.model.compute_s(worker, job.local_steps, self._now)
        self._post(seconds, worker, RoundEnds(job))
        self._submit(self.sequence, worker, job, seconds)

    def _submit(self, sequence: int, worker: NodeId, job: RunLocalSteps, seconds: float) -> None:
        future = None
        if self._pool is not None and worker in self.trainers:
            future = self._pool.submit(self.trainers[worker], job)
        self._rounds[worker] = _Round(sequence, job.lease.id, seconds, future)

    def _result(self, worker: NodeId, job: RunLocalSteps) -> LocalStepsDone:
        trainer, under_way = self.trainers.get(worker), self._rounds[worker]
        if trainer is None:
            done = untrained(job, under_way.seconds)
        else:
            done = under_way.future.result() if under_way.future else trainer(job)
            # Time is modelled here, and two runs of the same seed have the same trace.
            done = replace(done, seconds=under_way.seconds)
        del self._rounds[worker]
        return done

    def _undo_round(self, worker: NodeId) -> None:
        """A round that is taken away never was, however far its computation has come."""
        given_up = self._rounds.pop(worker, None)
        if given_up is None or given_up.future is None or given_up.future.cancel():
            return
        wait([given_up.future])
        if worker in self.undo:
            self.undo[worker](given_up.lease)

    def _is_abandoned(self, worker: NodeId, sequence: int) -> bool:
        current = self._rounds.get(worker)
        return current is None or current.sequence != sequence

    def _abandon(self, worker: NodeId) -> None:
        self._undo_round(worker)
        self._deadlines.pop(worker, None)
        self._heap = [entry for entry in self._heap if entry[2] != worker]
        heapq.heapify(self._heap)

    def _transfer_s(self, sender: NodeId, to: NodeId, message: Message) -> float:
        return self.model.transfer_s(sender, to, message)

    def _ask_deadline(self, name: NodeId) -> None:
        node = self.nodes.get(name)
        deadline = node.next_deadline() if node is not None else None
        if deadline is None:
            if name in self._deadlines:
                del self._deadlines[name]
        elif self._deadlines.get(name) != max(deadline, self._now):
            self.sequence += 1
            time = max(deadline, self._now)
            self._deadlines[name] = time
            heapq.heappush(self._heap, (time, self.sequence, name, DeadlineReached()))


def _order(entry: tuple[float, int, NodeId, Event | RoundEnds]) -> tuple[float, int]:
    return entry[0], entry[1]
