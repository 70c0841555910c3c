"""The virtual clock: events in order of modelled time; same seed, same trace, bit for bit."""

from __future__ import annotations

import heapq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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
from halos.runtime.dispatcher import Dispatcher, Trainer
from halos.runtime.environment import EnvironmentModel


@dataclass(frozen=True, slots=True)
class RoundEnds:
    """In the heap in place of a round's result, which is computed by then."""

    job: RunLocalSteps


def untrained(job: RunLocalSteps) -> LocalStepsDone:
    """The trainer of timing-only simulation."""
    return LocalStepsDone(
        lease=job.lease.id,
        local_steps=job.local_steps,
        tokens=job.lease.samples,
        loss=0.0,
        norm=0.0,
        seconds=0.0,
        payload=NOTHING,
    )


class VirtualClock(Dispatcher):
    """Drives nodes through modelled time.

    With ``threads`` the rounds of different workers are computed side by side while the order of
    events, and with it every number, stays that of the model.
    """

    def __init__(
        self,
        nodes: dict[NodeId, Node],
        model: EnvironmentModel,
        trainers: dict[NodeId, Trainer] | None = None,
        *,
        isolate: bool = False,
        threads: int = 0,
    ) -> None:
        super().__init__(nodes, isolate=isolate)
        self.now = 0.0
        self.sequence = 0
        self.model = model
        self.trainers = trainers or {}
        self.pending: list[tuple[float, int, NodeId, Event | RoundEnds]] = []
        self._deadlines: dict[NodeId, float] = {}
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._futures: dict[int, Future[LocalStepsDone]] = {}

    def run(self, *, until: float | None = None, events: int | None = None) -> bool:
        """Handle events until the root finishes, a time or a number of events is reached.

        Returns whether the run is over; ``False`` also when nothing is left to happen.
        """
        handled = 0
        while not self.finished and self.pending:
            if (until is not None and self.pending[0][0] > until) or handled == events:
                break
            self.step()
            handled += 1
        return self.finished

    def step(self) -> None:
        """Handle the next event."""
        time, sequence, name, event = heapq.heappop(self.pending)
        if isinstance(event, DeadlineReached) and self._deadlines.get(name) != time:
            return  # the node has since asked for another time
        self.now = time
        if isinstance(event, RoundEnds):
            if name not in self.nodes:
                return
            event = self._result(sequence, name, event.job)
        elif isinstance(event, DeadlineReached):
            del self._deadlines[name]
        self.dispatch(name, event, time)
        self._ask_deadline(name)

    def close(self) -> None:
        """End the threads, abandoning what they compute."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def restore(self, pending: list[tuple[float, int, NodeId, Event | RoundEnds]]) -> None:
        """Continue a captured run: what was under way is under way again."""
        self.pending = pending
        heapq.heapify(self.pending)
        for time, sequence, name, event in sorted(pending, key=lambda p: p[:2]):
            if isinstance(event, RoundEnds):
                self._submit(sequence, name, event.job)
            elif isinstance(event, DeadlineReached):
                self._deadlines[name] = time

    def _post(self, delay_s: float, node: NodeId, event: Event | RoundEnds) -> None:
        self.sequence += 1
        heapq.heappush(self.pending, (self.now + delay_s, self.sequence, node, event))

    def _train(self, worker: NodeId, job: RunLocalSteps) -> None:
        self._post(self.model.compute_s(worker, job.local_steps), worker, RoundEnds(job))
        self._submit(self.sequence, worker, job)

    def _submit(self, sequence: int, worker: NodeId, job: RunLocalSteps) -> None:
        if self._pool is not None and worker in self.trainers:
            self._futures[sequence] = self._pool.submit(self.trainers[worker], job)

    def _result(self, sequence: int, worker: NodeId, job: RunLocalSteps) -> LocalStepsDone:
        if future := self._futures.pop(sequence, None):
            return future.result()
        return self.trainers.get(worker, untrained)(job)

    def _abandon(self, worker: NodeId) -> None:
        self.pending = [p for p in self.pending if p[2] != worker]
        heapq.heapify(self.pending)

    def _transfer_s(self, sender: NodeId, to: NodeId, message: Message) -> float:
        return self.model.transfer_s(sender, to, message)

    def _ask_deadline(self, name: NodeId) -> None:
        node = self.nodes.get(name)
        deadline = node.next_deadline() if node is not None else None
        if deadline is None:
            self._deadlines.pop(name, None)
        elif self._deadlines.get(name) != deadline:
            self._deadlines[name] = deadline
            self.sequence += 1
            entry = (max(deadline, self.now), self.sequence, name, DeadlineReached())
            heapq.heappush(self.pending, entry)
