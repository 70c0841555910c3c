"""One thread that handles the events of some nodes, one at a time, and their deadlines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from halos.core.messages import DeadlineReached, Event, Node, NodeId

IDLE_S = 1.0  # between two looks at the deadlines when nothing happens


class Lane:
    """Feeds events to ``handle`` in order of arrival, from any thread, in a thread of its own.

    A process has several, so that a long ``apply`` at its server delays no heartbeat (DESIGN 3).
    ``failed`` hears of what ``handle`` raised; nothing is handled after that.
    """

    def __init__(
        self,
        name: str,
        nodes: Mapping[NodeId, Node],
        handle: Callable[[NodeId, Event], None],
        now: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.nodes = nodes
        self._handle = handle
        self._now = now
        self._failed = failed
        self._inbox: SimpleQueue[tuple[NodeId, Event] | Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, node: NodeId, event: Event) -> None:
        self._inbox.put((node, event))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have ``function`` called between two events; its result or exception comes back."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where the future is asked
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def close(self) -> None:
        """Handle what has arrived so far, then end the thread."""
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._next():
                pass
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._failed(error)

    def _next(self) -> bool:
        deadlines = [
            (deadline, name)
            for name, node in self.nodes.items()
            if (deadline := node.next_deadline()) is not None
        ]
        due, name = min(deadlines, default=(self._now() + IDLE_S, ""))
        if name and due <= self._now():
            self._handle(name, DeadlineReached())
            return True
        try:
            item = self._inbox.get(timeout=max(0.0, min(due - self._now(), IDLE_S)))
        except Empty:
            return True
        if item is None:
            return False
        if callable(item):
            item()
        else:
            self._handle(*item)
        return True
