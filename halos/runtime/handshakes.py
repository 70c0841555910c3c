"""Tells of callers who came no further than the TLS handshake.

Of those gRPC tells a server nothing, only that somebody connects, and later who calls. Whoever has
not called a few seconds after connecting did not get in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

log = logging.getLogger(__name__)

LOOK_S = 1.0
CALLS_WITHIN_S = 4.0  # of connecting; a call is sent in the same breath as the handshake's end
QUIET_S = 30.0  # between two lines
KNOWN_PEERS = 10_000


class Handshakes:
    """:meth:`begun` is safe in any thread, all else is for the event loop's."""

    def __init__(self) -> None:
        self._begun: deque[float] = deque()
        self._peers: dict[str, None] = {}  # the newest, as an ordered set
        self._failed = 0
        self._said_at = float("-inf")

    def begun(self) -> None:
        """Somebody has connected."""
        self._begun.append(time.monotonic())

    def called(self, peer: str) -> None:
        """A call has come over the connection from ``peer``, an address and port."""
        new = peer not in self._peers
        self._peers.pop(peer, None)
        self._peers[peer] = None
        if len(self._peers) > KNOWN_PEERS:
            del self._peers[next(iter(self._peers))]
        if new and self._begun:
            self._begun.pop()

    async def watch(self) -> None:
        """Say so, in one line now and then, when connections came to nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        while self._begun and self._begun[0] <= now - CALLS_WITHIN_S:
            self._begun.popleft()
            self._failed += 1
        if self._failed and now >= self._said_at + QUIET_S:
            log.warning(
                "refused %s before a call: no TLS, or a certificate that another authority issued "
                "or whose time is over; give --certs there as `halos certs issue` makes them",
                "a connection" if self._failed == 1 else f"{self._failed} connections",
            )
            self._failed, self._said_at = 0, now
