"""Back-pressure: how many exchanges with children may be under way at a server at once."""

from __future__ import annotations

import asyncio
from collections import deque

from halos.core.messages import NodeId


class Slots:
    """At most ``limit`` children exchange tensors with this server; the rest wait, in order.

    A child holds its slot from the announcement of an update until it has fetched what it got for
    it, so that a server's memory does not grow with the number of its workers (DESIGN 7).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._holders: set[NodeId] = set()
        self._waiting: deque[tuple[NodeId, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, child: NodeId) -> None:
        """Wait for a slot, unless ``child`` holds one already."""
        if child in self._holders:
            return
        if len(self._holders) < self.limit:
            self._holders.add(child)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((child, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came in the moment we gave up
                self.release(child)
            raise
        finally:
            self._waiting = deque(w for w in self._waiting if w[1] is not turn)

    def release(self, child: NodeId) -> None:
        """Give the child's slot to who waits longest; nothing if it holds none."""
        if child not in self._holders:
            return
        self._holders.remove(child)
        for waiting, turn in self._waiting:
            if not turn.done():
                self._holders.add(waiting)
                turn.set_result(None)
                return
