"""A server's connections to its children: who is here, what they are offered, what they send.

All of it runs in the event loop's thread, but for what says otherwise.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from halos.core.fragments import Fragments, ModelLayout
from halos.core.messages import Message, NodeId, Push, WorkerUpdate
from halos.core.tensors import NOTHING
from halos.runtime.deadlines import Deadlines
from halos.runtime.loop import LoopThread
from halos.runtime.slots import Slots
from halos.wire.chunks import Staging, check_manifest, chunks, manifest_of
from halos.wire.frames import (
    Begin,
    Begun,
    Channel,
    Chunk,
    CodecName,
    Codecs,
    Commit,
    Fetch,
    Fetched,
    Manifest,
    Offer,
    ParentFrame,
    Part,
    PeerRole,
    Said,
    Telemetry,
    Uploaded,
    UploadFrame,
)

log = logging.getLogger(__name__)

MAX_INFLIGHT = 2
"""Workers that exchange tensors at once: one sends while another fetches."""

SWEEP_S = 5.0
KEPT_S = 300.0
"""What a child has sent of an update outlives its connection for so long."""


class Unacceptable(Exception):  # noqa: N818  the peer's fault
    """What a peer asks for cannot be; ``retry``: it could be after a new hello."""

    def __init__(self, detail: str, *, retry: bool = False) -> None:
        super().__init__(detail)
        self.retry = retry


@dataclass
class _Upload:
    """An update that is coming in."""

    transfer: bytes
    message: WorkerUpdate | Push
    manifest: Manifest
    staging: Staging


@dataclass(eq=False)
class Child:
    """One child process. ``frames`` is what waits to be written to its stream."""

    name: NodeId
    role: PeerRole
    instance: bytes
    frames: asyncio.Queue[ParentFrame | None] = field(default_factory=asyncio.Queue)
    connected: bool = False
    expires: float = 0.0  # a name is kept this long for who said hello and does not talk
    left: float = 0.0  # when its last connection ended
    offers: dict[bytes, tuple[Fragments, Manifest]] = field(default_factory=dict)
    upload: _Upload | None = None
    moves_until: float | None = None  # its exchange is given up then, unless something moves
    telemetry: dict[str, Any] = field(default_factory=dict)


class Children:
    """:meth:`send` is safe in any thread; ``deliver`` is called in the loop's."""

    def __init__(
        self,
        loop: LoopThread,
        layout: ModelLayout,
        deliver: Callable[[NodeId, Channel, Message], None],
        codecs: Codecs,
        *,
        max_inflight: int = MAX_INFLIGHT,
    ) -> None:
        self.loop = loop
        self.layout = layout
        self.codecs = codecs
        self.slots = Slots(max_inflight)
        self.deadlines = Deadlines()
        self.sent_bytes = 0
        self.received_bytes = 0
        self._deliver = deliver
        self._known: dict[NodeId, Child] = {}

    # ------------------------------------------------------------ who is here

    def here(self) -> list[Child]:
        """Those who are connected."""
        return [child for child in list(self._known.values()) if child.connected]

    def observers(self) -> list[Child]:
        """Those who look at models, and have not been silent for long."""
        now = time.monotonic()
        return [c for c in list(self._known.values()) if c.role == "observer" and now < c.expires]

    def is_free(self, name: NodeId, instance: bytes) -> bool:
        """Whether a process may take this name: nobody else has it just now."""
        child = self._known.get(name)
        if child is None or child.instance == instance:
            return True
        return not child.connected and time.monotonic() >= child.expires

    def is_connected(self, name: NodeId, instance: bytes) -> bool:
        """Whether another living process goes by this name."""
        child = self._known.get(name)
        return child is not None and child.connected and child.instance != instance

    def expect(self, name: NodeId, role: PeerRole, instance: bytes, for_s: float) -> None:
        """Keep ``name`` for the process that just said hello."""
        child = self._known.get(name)
        if child is None or child.instance != instance:
            if child is not None:
                self._forget(child)
            child = self._known[name] = Child(name, role, instance)
        child.expires = time.monotonic() + for_s

    def find(self, name: NodeId, instance: bytes) -> Child:
        """Raises :class:`Unacceptable` for somebody who did not say hello."""
        child = self._known.get(name)
        if child is None or child.instance != instance:
            raise Unacceptable(f"{name or 'a peer'} did not say hello to this server", retry=True)
        return child

    # ------------------------------------------------------------ the stream of one child

    async def talk(
        self, child: Child, incoming: AsyncIterator[Any], write: Callable[[ParentFrame], Any]
    ) -> None:
        """Serve a child's stream until either end closes it."""
        self._end(child)
        child.frames = asyncio.Queue()
        child.connected = True
        mine = child.frames
        reading = asyncio.create_task(self._read(child, incoming))
        try:
            while (frame := await self._next(mine, reading)) is not None:
                await write(frame)
        finally:
            reading.cancel()
            if child.frames is mine:
                self._end(child)

    async def _next(
        self, frames: asyncio.Queue[ParentFrame | None], reading: asyncio.Task[None]
    ) -> ParentFrame | None:
        """The next frame to write; ``None`` once the child's side of the stream has ended."""
        getting = asyncio.ensure_future(frames.get())
        try:
            await asyncio.wait({getting, reading}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        reading.result()
        return None

    async def _read(self, child: Child, incoming: AsyncIterator[Any]) -> None:
        async for frame in incoming:
            match frame:
                case Said(channel, message):
                    self._deliver(child.name, channel, message)
                case Fetched(transfer):
                    self.fetched(child, transfer)
                case Telemetry(status):
                    child.telemetry = json.loads(status)
                case _:
                    raise Unacceptable(f"{child.name} sent a {type(frame).__name__} out of turn")

    def fetched(self, child: Child, transfer: bytes) -> None:
        """A child has this transfer: it need not be kept."""
        child.offers.pop(transfer, None)
        self._at_rest(child)

    def _end(self, child: Child) -> None:
        """The stream is over; an upload that was cut off may go on later."""
        if child.connected:
            child.connected, child.left = False, time.monotonic()
            child.frames.put_nowait(None)
        child.offers.clear()
        self._at_rest(child)
        child.telemetry = {}

    def _forget(self, child: Child) -> None:
        """It is nobody's child any more. Who still waits on its stream holds nothing of it."""
        self._end(child)
        child.upload = None
        self._known.pop(child.name, None)

    def hang_up(self, name: NodeId) -> None:
        """End the stream of a child; it may come back."""
        if (child := self._known.get(name)) is not None:
            self._end(child)

    # ------------------------------------------------------------ to children

    def send(self, child: NodeId, channel: Channel, message: Message) -> None:
        """Have ``message`` sent. It is lost if the child is not connected. Any thread may call."""
        self.loop.post(self._send, child, channel, message)

    def _send(self, name: NodeId, channel: Channel, message: Message) -> None:
        child = self._known.get(name)
        if child is None or not child.connected:
            return
        payload = getattr(message, "payload", None)
        if isinstance(payload, Fragments):
            offered = self._offer(child, message, payload)
            child.frames.put_nowait(offered)
            return
        child.frames.put_nowait(Said(channel, message))
        if channel is Channel.NODE and child.upload is None:
            self._at_rest(child)

    def _offer(self, child: Child, message: Any, payload: Fragments) -> Offer:
        transfer, manifest = self.pin(child, payload, self.codecs.of(message))
        return Offer(replace(message, payload=NOTHING), transfer, manifest)

    def pin(
        self, child: Child, payload: Fragments, codec: CodecName = "fp32"
    ) -> tuple[bytes, Manifest]:
        """Keep a payload for a child to fetch, as a transfer; only the newest of each child is."""
        manifest = manifest_of(payload, codec)
        transfer = secrets.token_bytes(16)
        child.offers = {transfer: (payload, manifest)}
        self._moved(child, payload.nbytes)
        return transfer, manifest

    async def download(self, child: Child, request: Fetch) -> AsyncIterator[Chunk]:
        offered = child.offers.get(request.transfer)
        if offered is None:
            raise Unacceptable("this is not offered any more", retry=True)
        payload, manifest = offered
        for chunk in chunks(payload, manifest, request.received):
            self.sent_bytes += len(chunk.data)
            yield chunk
            if request.transfer in child.offers:  # else it has told us already that it has it all
                self._moved(child, payload.nbytes)

    # ------------------------------------------------------------ from children

    async def begin(self, child: Child, request: Begin) -> Begun:
        """Make room for an update, or go on with one that was cut off."""
        message = request.message
        if not isinstance(message, WorkerUpdate | Push):
            raise Unacceptable(f"a {type(message).__name__} carries no tensors")
        if request.parts < 1:
            raise Unacceptable("an update has at least one part")
        if problem := check_manifest(request.manifest, self.layout):
            raise Unacceptable(
                f"the update of {child.name} does not fit the run's model: {problem}"
            )
        if child.role == "worker":  # servers are few, and each has a shadow here anyway
            await self.slots.acquire(child)
        if self._known.get(child.name) is not child:  # it started again while this call waited
            self.slots.release(child)
            raise Unacceptable(f"{child.name} has another process by now", retry=True)
        self._forget_oldest()
        upload = child.upload
        if upload is None or upload.manifest != request.manifest:
            upload = _Upload(b"", message, request.manifest, Staging(request.manifest))
        upload.transfer, upload.message = secrets.token_bytes(16), message
        child.upload = upload
        self._moved(child, _size(request.manifest))
        return Begun(upload.transfer, upload.staging.received())

    def _forget_oldest(self) -> None:
        """Of workers' updates that were cut off keep no more than there are slots."""
        workers = [child for child in self._known.values() if child.role == "worker"]
        cut_off = [c for c in workers if c.upload is not None and not c.connected]
        cut_off.sort(key=lambda child: child.left)
        for child in cut_off[: -self.slots.limit]:
            child.upload = None

    async def upload(self, child: Child, frames: AsyncIterator[UploadFrame]) -> Uploaded:
        """Take in what comes. Between two frames the child alone holds the update: a stream that
        was broken without our knowing keeps none of its memory."""
        transfer, announced, elements = None, False, 0
        async for frame in frames:
            if isinstance(frame, Chunk) and transfer is not None:
                self._add(child, transfer, frame)
                elements += frame.count
            elif isinstance(frame, Chunk) or transfer is not None:
                raise Unacceptable("a stream of chunks begins by saying of what they are, once")
            elif isinstance(frame, Part):
                transfer = self._coming(child, frame.transfer).transfer
            else:
                transfer, announced = (await self.begin(child, frame)).transfer, True
        if transfer is not None and announced:
            self.commit(child, Commit(transfer))
        return Uploaded(elements)

    def _add(self, child: Child, transfer: bytes, chunk: Chunk) -> None:
        upload = self._coming(child, transfer)  # if it is still wanted
        upload.staging.add(chunk)
        self.received_bytes += len(chunk.data)
        self._moved(child, _size(upload.manifest))

    def commit(self, child: Child, request: Commit) -> None:
        """Hand a whole update to the server; nothing of one that is not whole."""
        upload = self._coming(child, request.transfer)
        if not upload.staging.complete:
            raise Unacceptable("this update is not whole", retry=True)
        child.upload = None
        message = replace(upload.message, payload=upload.staging.take())
        self._deliver(child.name, Channel.NODE, message)

    def _coming(self, child: Child, transfer: bytes) -> _Upload:
        if child.upload is None or child.upload.transfer != transfer:
            raise Unacceptable("this update is not expected any more", retry=True)
        return child.upload

    # ------------------------------------------------------------ exchanges that stand still

    def _moved(self, child: Child, size_bytes: int) -> None:
        child.moves_until = time.monotonic() + self.deadlines.of(size_bytes)

    def _at_rest(self, child: Child) -> None:
        child.moves_until = None
        self.slots.release(child)

    async def sweep(self) -> None:
        """Give up, now and again, what has not moved for too long."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep_once(time.monotonic())

    def _sweep_once(self, now: float) -> None:
        for child in list(self._known.values()):
            if child.moves_until is not None and now >= child.moves_until:
                log.warning("%s: a transfer stands still; the connection is given up", child.name)
                child.upload = None
                self._end(child)
            kept = child.left + KEPT_S if child.upload is not None else child.left
            if not child.connected and now >= max(kept, child.expires + 10 * SWEEP_S):
                self._forget(child)


def _size(manifest: Manifest) -> int:
    return 4 * sum(header.elements for header in manifest.fragments)
