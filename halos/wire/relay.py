"""Bytes from one socket to another over a lane that gives them a rate and a delay.

What :mod:`halos.wire.link` is made of: a lane for each direction, shared by all connections, and
for each connection two flows, each of which reads into a queue and writes out of it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

SMALLEST_CHUNK, LARGEST_CHUNK = 4 << 10, 256 << 10
CHUNK_S = 0.005  # of the rate in one chunk: how finely connections share a lane
SOCKET_S = 0.02  # of the rate in a socket's buffer: how late the loop may be and lose nothing
BUFFER_S = 0.1  # of the rate for a receiver that falls behind
SEGMENT = 1400  # bytes, as on most networks
UNLIMITED = 500e6  # bytes a second that the queue is made for where there is no rate


class Lane:
    """One direction of a link. ``carried``: bytes that have come out of its far end."""

    def __init__(self, rate: float | None, delay_s: float) -> None:
        """``rate`` in bytes a second; None: no limit."""
        self.delay_s = delay_s
        self.carried = 0
        self._rate = rate
        self._free_at = 0.0
        self._left: int | None = None  # bytes until it is cut
        self._cut: Callable[[], None] | None = None
        if rate is None:
            self.chunk = LARGEST_CHUNK
            self.capacity = 4 * LARGEST_CHUNK + int(UNLIMITED * delay_s)
        else:
            self.chunk = min(max(int(rate * CHUNK_S), SMALLEST_CHUNK), LARGEST_CHUNK)
            self.capacity = int(max(LARGEST_CHUNK, rate * BUFFER_S) + rate * delay_s)

    def departure(self, size: int, ready: float) -> float:
        """When the last of ``size`` bytes has left, which could have begun to at ``ready``."""
        if self._rate is None:
            return ready
        self._free_at = max(self._free_at, ready) + size / self._rate
        return self._free_at

    def tune(self, end: socket.socket) -> None:
        """Keep the kernel from taking seconds' worth of bytes, which would hide the rate."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._rate is not None:
            size = max(32 << 10, int(self._rate * SOCKET_S))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            # The other side's buffer is a multiple of the segments, which loopback has of 64 KiB.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)

    def cut_after(self, size: int | None, cut: Callable[[], None] | None) -> None:
        """Call ``cut`` once ``size`` more bytes are carried; None: never."""
        self._left, self._cut = size, cut

    def allowed(self, size: int) -> int:
        """How many of ``size`` bytes may be carried before the cut."""
        return size if self._left is None else min(size, self._left)

    def carry(self, size: int) -> None:
        self.carried += size
        if self._left is not None:
            self._left -= size
            if self._left == 0 and self._cut is not None:
                self._cut()


class ConnectionReset(Exception):  # noqa: N818  an end of a connection like another
    """One side has reset the connection, and the other is now to hear of it."""


RESET = None  # in the place of bytes; no bytes are the end of them


@dataclass
class Flow:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    lane: Lane
    whole: asyncio.Event  # while the link is not cut
    broken: bool = False  # the source has reset the connection, as its other flow has found
    at_end: bool = False  # nothing more will be read
    over: bool = False  # nothing more will be written
    _queue: asyncio.Queue[tuple[float, bytes | None]] = field(default_factory=asyncio.Queue)
    _queued: int = 0  # bytes
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _awake: asyncio.Event = field(default_factory=asyncio.Event)  # who waits to write

    async def read(self) -> None:
        """Take bytes from the source no faster than the lane carries them."""
        loop = asyncio.get_running_loop()
        ready = loop.time()  # since when the next bytes could leave; the past when we are late
        while not self.at_end:
            if self._queued >= self.lane.capacity:
                self._room.clear()
                await self._room.wait()
                ready = loop.time()
            data, waited = await self._receive()
            if waited:
                ready = loop.time()
            self.at_end = not data
            ready = self.lane.departure(len(data or b""), ready)
            self._put(data, ready + self.lane.delay_s)
            await asyncio.sleep(ready - loop.time())

    async def write(self, back: Flow) -> None:
        """Hand bytes to the sink when they arrive. ``back``: the connection's other direction."""
        loop = asyncio.get_running_loop()
        while True:
            arrives, data = await self._queue.get()
            if (early := arrives - loop.time()) > 0:
                await asyncio.sleep(early)
            await self.whole.wait()
            if data is RESET:
                raise ConnectionReset
            try:
                if not data:
                    self.over = True
                    self.sink.shutdown(socket.SHUT_WR)
                    return
                await self._deliver(data)
            except OSError:
                self.over = True
                back.breaks()
                return

    def breaks(self) -> None:
        """The source has reset the connection: its sink hears of it, after what it has room for."""
        if self.over:
            raise ConnectionReset
        self.broken = True
        self._awake.set()
        if self.at_end:  # else the reader will find out
            self._put(RESET, asyncio.get_running_loop().time() + self.lane.delay_s)

    async def _receive(self) -> tuple[bytes | None, bool]:
        """Bytes, none at their end, or ``RESET``; and whether they had to be waited for."""
        waited = False
        try:
            try:
                data = self.source.recv(self.lane.chunk)
            except BlockingIOError:
                waited = True
                loop = asyncio.get_running_loop()
                data = await loop.sock_recv(self.source, self.lane.chunk)
        except OSError:
            return RESET, waited
        return data if data or not self.broken else RESET, waited

    async def _deliver(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            await self.whole.wait()
            try:
                sent = self.sink.send(rest[: self.lane.allowed(len(rest))])
            except BlockingIOError:
                if self.broken:
                    raise ConnectionReset from None
                await self._writable()
                continue
            rest = rest[sent:]
            self._queued -= sent
            self.lane.carry(sent)
            if self._queued < self.lane.capacity:
                self._room.set()

    async def _writable(self) -> None:
        """Wait until the sink takes bytes again, or the source has gone."""
        loop = asyncio.get_running_loop()
        self._awake.clear()
        loop.add_writer(self.sink, self._awake.set)
        try:
            await self._awake.wait()
        finally:
            loop.remove_writer(self.sink)

    def _put(self, data: bytes | None, arrives: float) -> None:
        self._queued += len(data or b"")
        self._queue.put_nowait((arrives, data))


async def relay(
    near: socket.socket, far: socket.socket, up: Lane, down: Lane, whole: asyncio.Event
) -> bool:
    """Carry one connection to its end; whether both sides ended it in good order."""
    there, back = Flow(near, far, up, whole), Flow(far, near, down, whole)
    orderly = True
    try:
        async with asyncio.TaskGroup() as both:
            for flow, other in ((there, back), (back, there)):
                both.create_task(flow.read())
                both.create_task(flow.write(other))
    except* ConnectionReset:
        orderly = False
    return orderly


def close_by_reset(end: socket.socket) -> None:
    """Close as a machine does that knows of no such connection."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
