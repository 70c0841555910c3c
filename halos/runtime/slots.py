"""Back-pressure: how many exchanges with children may be under way at a server at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class Slots:
    """At most ``limit`` children exchange tensors with this server; the rest wait, in order.

    A child holds its slot from the announcement of an update until it has fetched what it got for
    it, so that a server's memory does not grow with the number of its workers (DESIGN 7).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._holders: set[Hashable] = set()
        self._waiting: deque[tuple[Hashable, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        return len(self._holders)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, child: Hashable) -> None:
        """Wait for a slot, unless ``child`` holds one already.

        Who asks again while it waits takes its own place in the queue: the earlier call, whose
        connection may be gone without our knowing, is cancelled.
        """
        if child in self._holders:
            return
        if len(self._holders) < self.limit:
            self._holders.add(child)
            return
        turn = asyncio.get_running_loop().create_future()
        self._enqueue(child, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came in the moment we gave up
                self.release(child)
            raise
        finally:
            self._waiting = deque(w for w in self._waiting if w[1] is not turn)

    def _enqueue(self, child: Hashable, turn: asyncio.Future[None]) -> None:
        for place, (waiting, earlier) in enumerate(self._waiting):
            if waiting == child and not earlier.done():
                self._waiting[place] = child, turn
                earlier.cancel()
                return
        self._waiting.append((child, turn))

    def release(self, child: Hashable) -> None:
        """Give the child's slot to who waits longest; nothing if it holds none."""
        if child not in self._holders:
            return
        self._holders.remove(child)
        for waiting, turn in self._waiting:
            if not turn.done():
                self._holders.add(waiting)
                turn.set_result(None)
                return
