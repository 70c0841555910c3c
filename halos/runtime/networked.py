"""The driver of production: the nodes of one process, in real time, over sockets.

A server or worker decides in one thread, its session and membership in another, training has a
third, and the sockets are in the event loop's. Nothing here knows of gRPC: ``parent`` and
``children`` take messages away, and hand in what came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from halos.core.membership import membership_of, session_of
from halos.core.messages import (
    Event,
    Finish,
    LinkLost,
    LocalStepsDone,
    Message,
    Node,
    NodeId,
    Received,
    Refused,
    RunLocalSteps,
)
from halos.errors import Interrupted, UserError
from halos.runtime.dispatcher import Dispatcher, Pending, Trainer
from halos.runtime.lane import Lane
from halos.wire.frames import Channel


class ToParent(Protocol):
    def send(self, channel: Channel, message: Message) -> None:
        """Take a message to the parent away; it may get lost, and then the link was lost."""
        ...


class ToChildren(Protocol):
    def send(self, child: NodeId, channel: Channel, message: Message) -> None:
        """Take a message to a child away; it is lost if the child is not connected."""
        ...


class Networked(Dispatcher):
    """``main`` is the process's server or worker; ``parent_name`` the server above, if any."""

    def __init__(
        self,
        main: NodeId,
        nodes: dict[NodeId, Node],
        *,
        parent_name: NodeId | None = None,
        trainer: Trainer | None = None,
        give_up: Callable[[], None] | None = None,
        epoch: int = 0,
    ) -> None:
        """``give_up`` has a round that ``trainer`` is amid raise ``Interrupted`` soon."""
        super().__init__(nodes, {main: trainer} if trainer else {}, isolate=None)
        self.main = main
        self.parent_name = parent_name
        self.parent: ToParent | None = None
        self.children: ToChildren | None = None
        self.failure: BaseException | None = None
        self.busy_s = 0.0
        self._epoch = epoch
        self._began = time.monotonic()
        self._over = threading.Event()
        self._job: RunLocalSteps | None = None  # whose result is awaited
        self._give_up = give_up
        self._compute = ThreadPoolExecutor(1, thread_name_prefix=f"{main} trains")
        beside = {n: node for n, node in nodes.items() if n != main}
        self._main_lane = self._lane(f"{main} decides", {main: nodes[main]})
        self._lanes = dict.fromkeys(nodes, self._main_lane) | dict.fromkeys(
            beside, self._lane(f"{main} members", beside)
        )

    def _lane(self, name: str, nodes: dict[NodeId, Node]) -> Lane:
        return Lane(name, nodes, self._handle, lambda: self.now, self.fail)

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    @property
    def epoch(self) -> int:
        return self._epoch

    # ------------------------------------------------------------ life

    def begin(self) -> None:
        """Start the nodes. Nothing may come in from the network before."""
        self.start()
        for lane in {id(lane): lane for lane in self._lanes.values()}.values():
            lane.start()

    def run(self, *, tick: Callable[[], None] | None = None, tick_s: float = 0.25) -> bool:
        """Wait until the main node has finished or :meth:`stop` was called; whether it finished.

        Raises what went wrong in a node or in training, and ``UserError`` when the parent turned
        this process away. ``tick`` is called in this thread meanwhile.
        """
        while not self._over.wait(tick_s):
            if tick is not None:
                tick()
        if self.failure is not None:
            raise self.failure
        return self.finished

    def stop(self) -> None:
        super().stop()
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Have ``run`` raise ``error``."""
        self.failure = self.failure or error
        self.stop()

    def between_events(self, function: Callable[[], Any]) -> Future[Any]:
        """Have ``function`` called while the main node is at rest."""
        return self._main_lane.call(function)

    def close(self) -> None:
        """End all threads; a round in training is interrupted."""
        self.stop()
        for lane in {id(lane): lane for lane in self._lanes.values()}.values():
            lane.close()
        self._compute.shutdown(wait=True, cancel_futures=True)

    def under_way(self) -> list[Pending]:
        """Nothing that would be kept: nodes are restarted, and say again what was not heard."""
        return []

    def restore(self, pending: list[Pending]) -> None:
        assert not pending

    # ------------------------------------------------------------ from the network, any thread

    def from_parent(self, channel: Channel, message: Message) -> None:
        assert self.parent_name is not None
        if channel is Channel.SESSION:
            self._turned_away(message)
            sender, to = membership_of(self.parent_name), session_of(self.main)
        else:
            sender, to = self.parent_name, self.main
        self._post(0.0, to, Received(sender, message))

    def from_child(self, child: NodeId, channel: Channel, message: Message) -> None:
        if channel is Channel.SESSION:
            self._post(0.0, membership_of(self.main), Received(session_of(child), message))
        else:
            self._post(0.0, self.main, Received(child, message))

    def parent_lost(self) -> None:
        self._post(0.0, session_of(self.main), LinkLost())

    def _turned_away(self, message: Message) -> None:
        if isinstance(message, Refused) and message.reason != "fenced":
            self.fail(
                UserError(f"{self.parent_name} does not take {self.main} in: {message.detail}")
            )

    # ------------------------------------------------------------ what the dispatcher asks for

    def _handle(self, name: NodeId, event: Event) -> None:
        self.dispatch(name, event, self.now)

    def _post(self, delay_s: float, node: NodeId, event: Event) -> None:
        assert delay_s == 0, "nothing takes longer here than it takes"
        if (lane := self._lanes.get(node)) is not None:
            lane.post(node, event)

    def _send(self, sender: NodeId, to: NodeId, message: Message) -> None:
        process, _, beside = to.partition(".")
        channel = Channel.SESSION if beside else Channel.NODE
        if process == self.parent_name:
            if self.parent is not None:
                self.parent.send(channel, message)
        elif self.children is not None:
            self.children.send(process, channel, message)

    def _carry_out(self, name: NodeId, effect: Any) -> None:
        super()._carry_out(name, effect)
        if isinstance(effect, Finish) and name == self.main:
            self.finished = True
            self._over.set()

    def _train(self, worker: NodeId, job: RunLocalSteps) -> None:
        self._abandon(worker)
        self._job = job
        self._compute.submit(self._round, worker, job)

    def _abandon(self, worker: NodeId) -> None:
        taken, self._job = self._job, None
        if taken is not None and self._give_up is not None:
            self._give_up()

    def _round(self, worker: NodeId, job: RunLocalSteps) -> None:
        if self.stopping.is_set() or self._job is not job:
            return
        try:
            done = self.trainers[worker](job)
        except Interrupted:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by ``run``
            self.fail(error)
            return
        self._main_lane.call(lambda: self._trained(worker, job, done))

    def _trained(self, worker: NodeId, job: RunLocalSteps, done: LocalStepsDone) -> None:
        if self._job is not job:
            return  # its lease was taken away while it was trained
        self._job = None
        self.busy_s += done.seconds
        try:
            self._handle(worker, done)
        except BaseException as error:  # noqa: BLE001 - raised again by ``run``
            self.fail(error)
