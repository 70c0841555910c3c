"""The in-process driver: real time, one thread a worker, one that decides.

Messages share no memory. All nodes are handled by the thread that calls :meth:`InProcess.run`,
so that between two events the whole run is in one consistent state, which can be captured
without stopping the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from halos.core.messages import (
    DeadlineReached,
    Event,
    LocalStepsDone,
    Node,
    NodeId,
    RunLocalSteps,
)
from halos.errors import Interrupted
from halos.runtime.dispatcher import Dispatcher, Pending, RoundEnds, Trainer
from halos.wire.roundtrip import RoundTrip


@dataclass
class _Compute:
    """A worker's thread and the time it has spent computing."""

    thread: ThreadPoolExecutor
    busy_s: float = 0.0
    job: RunLocalSteps | None = None  # whose result is awaited


@dataclass(frozen=True, slots=True)
class _RoundDone:
    job: RunLocalSteps
    result: LocalStepsDone


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException = field(repr=False)


class InProcess(Dispatcher):
    """Drives nodes in real time. ``now`` goes on from where a captured run was."""

    def __init__(
        self,
        nodes: dict[NodeId, Node],
        trainers: dict[NodeId, Trainer],
        *,
        isolate: RoundTrip | None = None,
        now: float = 0.0,
    ) -> None:
        """``isolate``: by default everything travels in fp32."""
        super().__init__(nodes, trainers, isolate=isolate or RoundTrip())
        self._start = time.monotonic() - now
        self._inbox: SimpleQueue[tuple[NodeId, Event | _RoundDone | _Failed] | None] = SimpleQueue()
        self._compute = {
            name: _Compute(ThreadPoolExecutor(1, thread_name_prefix=name)) for name in trainers
        }

    @property
    def now(self) -> float:
        return time.monotonic() - self._start

    @property
    def busy_s(self) -> dict[NodeId, float]:
        """Seconds that each worker has computed in finished rounds."""
        return {name: compute.busy_s for name, compute in self._compute.items()}

    def run(self, *, tick: Callable[[], None] | None = None, tick_s: float = 0.25) -> bool:
        """Handle events until the root finishes or :meth:`stop` is called; whether it finished.

        ``tick`` is called between events, about every ``tick_s``. An error in a worker's training
        is raised here.
        """
        next_tick = self.now
        while not self.finished and not self.stopping.is_set():
            if tick is not None and self.now >= next_tick:
                tick()
                next_tick = self.now + tick_s
            self._handle_next(next_tick if tick is not None else self.now + 1.0)
        return self.finished

    def stop(self) -> None:
        super().stop()
        self._inbox.put(None)  # wakes ``run`` up

    def close(self) -> None:
        """End the workers' threads; rounds that are not finished are abandoned."""
        self.stopping.set()
        for compute in self._compute.values():
            compute.thread.shutdown(wait=True, cancel_futures=True)

    def under_way(self) -> list[Pending]:
        waiting = []
        while True:
            try:
                waiting.append(self._inbox.get_nowait())
            except Empty:
                break
        for item in waiting:
            self._inbox.put(item)
        pending: list[Pending] = []
        for name, compute in self._compute.items():
            if compute.job is not None:
                pending.append(Pending(self.now, len(pending), name, RoundEnds(compute.job)))
        for item in waiting:
            if item is not None and not isinstance(item[1], _RoundDone | _Failed):
                pending.append(Pending(self.now, len(pending), item[0], item[1]))
        return pending

    def restore(self, pending: list[Pending]) -> None:
        for entry in sorted(pending, key=lambda p: p.sequence):
            if isinstance(entry.event, RoundEnds):
                self._train(entry.node, entry.event.job)
            else:
                self._inbox.put((entry.node, entry.event))

    def _handle_next(self, until: float) -> None:
        deadlines = [
            (deadline, name)
            for name, node in self.nodes.items()
            if (deadline := node.next_deadline()) is not None
        ]
        due, name = min(deadlines, default=(until, ""))
        if due <= self.now and name:
            self.dispatch(name, DeadlineReached(), self.now)
            return
        try:
            item = self._inbox.get(timeout=max(0.0, min(due, until) - self.now))
        except Empty:
            return
        if item is None:
            return
        name, event = item
        if isinstance(event, _Failed):
            raise event.error
        if isinstance(event, _RoundDone):
            compute = self._compute[name]
            if compute.job is not event.job:
                return  # the lease was taken away while it was trained
            compute.job = None
            compute.busy_s += event.result.seconds
            event = event.result
        self.dispatch(name, event, self.now)

    def _post(self, delay_s: float, node: NodeId, event: Event) -> None:
        assert delay_s == 0, "nothing takes longer here than it takes"
        self._inbox.put((node, event))

    def _train(self, worker: NodeId, job: RunLocalSteps) -> None:
        compute = self._compute[worker]
        compute.job = job
        compute.thread.submit(self._round, worker, compute, job)

    def _round(self, worker: NodeId, compute: _Compute, job: RunLocalSteps) -> None:
        if self.stopping.is_set() or compute.job is not job:
            return
        try:
            self._inbox.put((worker, _RoundDone(job, self.trainers[worker](job))))
        except Interrupted:
            pass  # the job stays under way, and is done again after a resume
        except BaseException as error:  # noqa: BLE001 - raised again where somebody listens
            self._inbox.put((worker, _Failed(error)))

    def _abandon(self, worker: NodeId) -> None:
        if worker in self._compute:
            self._compute[worker].job = None
