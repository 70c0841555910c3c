"""A child's connection to its parent: kept up or tried again for as long as the process lives.

All of it runs in the event loop's thread, but for what says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from halos.core.fragments import Fragments
from halos.core.messages import Assignment, Join, Message, Push, PushAnswer, Resumed, WorkerUpdate
from halos.core.tensors import NOTHING, Payload
from halos.errors import UserError
from halos.runtime.control import dial
from halos.runtime.deadlines import Deadlines
from halos.runtime.loop import LoopThread
from halos.wire.chunks import Staging, check_manifest, chunks, layout_from, manifest_of
from halos.wire.frames import (
    Begin,
    Channel,
    ChildFrame,
    CodecName,
    Codecs,
    Commit,
    Fetch,
    Fetched,
    Greeting,
    Header,
    Hello,
    Hold,
    Manifest,
    Offer,
    Part,
    Progress,
    Said,
    Telemetry,
    UploadFrame,
)
from halos.wire.rpc import Stub
from halos.wire.security import Security, explain, was_closed, will_not_heal
from halos.wire.serde import MalformedMessage

log = logging.getLogger(__name__)

CALL_S = 30.0  # for a call that moves no tensors
RETRY_S = (0.2, 0.5, 1.0, 2.0)  # between tries to connect; the last one again and again
PATIENCE_S = 3600.0  # a parent that is away for longer is given up
LASTING_S = 10.0  # a connection that lives for so long was a good one
CLOSED_TRIES = 10  # in a row that a server never met closed the connection at once
TAKEN_TRIES = 30  # in a row that our name is another's; one that died unseen is gone by then
REMIND_S = 30.0  # between two lines about the same trouble
GOODBYE_S = 3.0
SHUT = (
    "the connection is closed at once, though the server was there before; it is away, or the "
    "network in between shuts it off"
)

Carries = WorkerUpdate | Push


class LinkEnded(Exception):  # noqa: N818  nothing went wrong here
    """The parent closed the stream."""


@dataclass
class Traffic:
    """Bytes of encoded tensors that crossed a link, as its child sees it."""

    sent: int = 0
    received: int = 0


class Waiting:
    """Says what is waited for: once a reason, then now and again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = ""
        self._at = 0.0
        self._tries = 0

    def next_s(self, reason: str) -> float:
        """Seconds until the next try, having told of it where that is news."""
        pause = RETRY_S[min(self._tries, len(RETRY_S) - 1)]
        self._tries += 1
        now = time.monotonic()
        if reason != self._said or now >= self._at + REMIND_S:
            self._said, self._at = reason, now
            log.warning("waiting for %s: %s; next try in %g s", self._what, reason, pause)
        return pause

    def over(self) -> None:
        if self._said:
            log.warning("%s is there", self._what)
        self._said, self._tries = "", 0


class ParentLink:
    """Dials ``address``. First :meth:`greet`, then :meth:`start`; :meth:`send` from any thread."""

    def __init__(
        self,
        loop: LoopThread,
        address: str,
        security: Security,
        hello: Hello,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.loop = loop
        self.address = address
        self.security = security
        self.hello = replace(hello, instance=hello.instance or secrets.token_bytes(16))
        self.patience_s = patience_s
        self.traffic = Traffic()
        self.deadlines = Deadlines()
        self.connected = False
        self.greeting: Greeting | None = None
        self._waiting = Waiting(f"the server at {address}")
        self._channels: dict[bool, tuple[grpc.aio.Channel, Stub]] = {}  # for bulk, for the rest
        self._outgoing: asyncio.Queue[ChildFrame | None] = asyncio.Queue()
        self._tasks: asyncio.TaskGroup | None = None
        self._ended = asyncio.Event()
        self._upload: asyncio.Task[None] | None = None
        self._downloads: dict[type[Message], asyncio.Task[None]] = {}
        self._partial: dict[bytes, Staging] = {}
        self._join: Message | None = None
        self._kept: Future[None] | None = None
        self._contents: dict[int, tuple[Payload, Manifest]] = {}

    # ------------------------------------------------------------ greeting

    async def greet(self) -> Greeting:
        """Say hello until the server answers. ``UserError`` if it never will, or turns us away."""
        since, closed, taken = time.monotonic(), 0, 0
        while True:
            try:
                greeting = await self._say_hello()
            except grpc.aio.AioRpcError as error:
                closed = closed + 1 if was_closed(error) and not self._met else 0
                taken = taken + 1 if error.code() is grpc.StatusCode.ALREADY_EXISTS else 0
                if self._is_final(error) or closed == CLOSED_TRIES or taken == TAKEN_TRIES:
                    raise UserError(explain(error, self.address, self.security)) from None
                await self._pause(error, since)
                continue
            self._waiting.over()
            self.greeting = greeting
            self.hello = replace(self.hello, name=greeting.name, run=greeting.run)
            self._layout = layout_from(greeting.layout)
            return greeting

    @property
    def _met(self) -> bool:
        """Whether the server has answered once."""
        return self.greeting is not None

    def _is_final(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether we were turned away for good.

        Where the server has answered once, only it can do that: what the transport finds wrong
        may be a gateway's answer in its absence, and passes.
        """
        of_transport = error.code() is grpc.StatusCode.UNAVAILABLE
        return will_not_heal(error) and not (of_transport and self._met)

    async def _pause(self, error: grpc.aio.AioRpcError, since: float) -> None:
        reason = explain(error, self.address, self.security)
        if was_closed(error) and self._met:
            reason = f"{self.address}: {SHUT}"
        if time.monotonic() > since + self.patience_s:
            raise UserError(f"gave up after {self.patience_s:g} s: {reason}")
        await asyncio.sleep(self._waiting.next_s(reason.removeprefix(f"{self.address}: ")))

    async def _say_hello(self) -> Greeting:
        try:
            greeting: Greeting = await self.stub().call(
                "Hello", self.hello, metadata=self.metadata(), timeout=CALL_S
            )
        except MalformedMessage as error:
            raise UserError(
                f"{self.address}: does not speak this version's wire ({error})"
            ) from error
        return greeting

    async def constants(self) -> bytes:
        """The model's frozen parameters and buffers, as the server has them."""
        blobs = self.stub(bulk=True).stream("Constants", None, metadata=self.metadata())
        return b"".join([blob async for blob in blobs])

    def stub(self, *, bulk: bool = False) -> Stub:
        """The server's methods. ``bulk``: over a connection of its own, for tensors, behind which
        no heartbeat has to queue."""
        if bulk not in self._channels:
            channel = dial(self.address, self.security)
            self._channels[bulk] = channel, Stub(channel)
        return self._channels[bulk][1]

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What every call carries: the token, and who calls."""
        return (
            *self.security.metadata(),
            ("halos-node-bin", self.hello.name.encode()),
            ("halos-instance-bin", self.hello.instance),
        )

    # ------------------------------------------------------------ while it lives

    def start(
        self,
        codecs: Codecs,
        deliver: Callable[[Channel, Message], None],
        lost: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Talk from now on; connect again whenever the connection ends. Any thread may call this.

        ``failed`` hears, once, of what :meth:`greet` raises when that cannot be.
        """
        self._codecs, self._deliver = codecs, deliver

        def ended(kept: Future[None]) -> None:
            if not kept.cancelled() and (error := kept.exception()) is not None:
                failed(error)

        self._kept = self.loop.submit(self._keep(lost))
        self._kept.add_done_callback(ended)

    def stop(self, goodbye: Message | None = None) -> None:
        """Send ``goodbye`` if there is a connection, then end it for good. Any thread may call."""
        self.loop.run(self._say_goodbye(goodbye))
        if self._kept is not None:
            self._kept.cancel()
        self.loop.run(self._reset())

    async def _keep(self, lost: Callable[[], None]) -> None:
        brief = 0  # connections in a row that did not last
        while True:
            began = time.monotonic()
            ended = await self._talk()
            self.connected = False
            lost()
            await self._reset()
            brief = brief + 1 if time.monotonic() < began + LASTING_S else 0
            if isinstance(ended, grpc.aio.AioRpcError):
                reason = explain(ended, self.address, self.security)
                if self._is_final(ended):
                    raise UserError(reason)
                log.warning("lost the server at %s", reason)  # which begins with the address
            await asyncio.sleep(RETRY_S[min(brief, len(RETRY_S) - 1)])
            await self.greet()

    async def _talk(self) -> Exception:
        """Until the stream ends, for whatever reason, which is returned."""
        call = self.stub().open("Talk", metadata=self.metadata())
        ended: Exception = LinkEnded()
        self._ended.clear()
        self._outgoing = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await call.write(Hold(self.hello.name, self.hello.instance))
                tasks.create_task(self._write(call))
                self.connected = True
                if self._join is not None:
                    self._outgoing.put_nowait(Said(Channel.SESSION, self._join))
                async for frame in call:
                    self._take(frame)
                raise LinkEnded
        except* (grpc.aio.AioRpcError, LinkEnded, MalformedMessage) as group:
            ended = _first(group)
        except* asyncio.InvalidStateError:
            pass  # it ended while something was written: we learn why, if at all, by trying again
        finally:
            self._tasks, self._upload = None, None
            self._downloads.clear()
            self._ended.set()
            call.cancel()
        return ended

    async def _write(self, call: Any) -> None:
        while (frame := await self._outgoing.get()) is not None:
            await call.write(frame)
        await call.done_writing()

    async def _reset(self) -> None:
        """A channel that broke is not used again: its back-off would outlast the trouble."""
        channels, self._channels = self._channels, {}
        for channel, _ in channels.values():
            await channel.close(None)

    async def _say_goodbye(self, goodbye: Message | None) -> None:
        if goodbye is None or not self.connected:
            return
        self._outgoing.put_nowait(Said(Channel.SESSION, goodbye))
        self._outgoing.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._ended.wait()  # the server ends the stream

    # ------------------------------------------------------------ to the parent

    def send(self, channel: Channel, message: Message) -> None:
        """Have ``message`` sent. It is lost with the connection. Any thread may call this."""
        self.loop.post(self._send, channel, message)

    def tell(self, status: str) -> None:
        """Have the parent know what goes on here. Any thread may call this."""
        self.loop.post(self._tell, status)

    def _tell(self, status: str) -> None:
        if self.connected:
            self._outgoing.put_nowait(Telemetry(status))

    def _send(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Join):
            self._join = message  # also for when the connection is there
        if not self.connected or self._tasks is None:
            return
        if isinstance(message, WorkerUpdate | Push) and isinstance(message.payload, Fragments):
            if self._upload is not None:
                self._upload.cancel()
            self._upload = self._tasks.create_task(self._carry(message, message.payload))
        else:
            self._outgoing.put_nowait(Said(channel, message))

    async def _carry(self, message: Carries, payload: Fragments) -> None:
        assert self.greeting is not None
        header = Header(
            run=self.greeting.run,
            protocol=self.greeting.protocol,
            specification_version=self.greeting.specification_version,
            sender=self.hello.name,
        )
        again = id(payload) in self._contents
        manifest = self._manifest(payload, self._codecs.of(message))
        begin = Begin(header, replace(message, payload=NOTHING), manifest)
        if isinstance(message, Push) and not again:
            await self._send_at_once(begin, payload)
        else:
            await self._send_in_turn(begin, payload)

    async def _send_at_once(self, begin: Begin, payload: Fragments) -> None:
        """All in one call: over a wide area each round trip counts."""
        frames = self._frames(begin, payload, begin.manifest)
        await self.stub(bulk=True).call("Upload", frames, metadata=self.metadata())

    async def _send_in_turn(self, begin: Begin, payload: Fragments) -> None:
        """Only when the server has room for it, and only what it does not have.

        How long it lets us wait is its affair; the stream says if it died.
        """
        stub, metadata = self.stub(bulk=True), self.metadata()
        begun = await stub.call("Begin", begin, metadata=metadata)
        frames = self._frames(Part(begun.transfer, 0), payload, begin.manifest, begun.received)
        limit = self.deadlines.of(payload.nbytes)
        await stub.call("Upload", frames, metadata=metadata, timeout=limit)
        await stub.call("Commit", Commit(begun.transfer), metadata=metadata, timeout=CALL_S)

    async def _frames(
        self,
        first: Begin | Part,
        payload: Fragments,
        manifest: Manifest,
        received: tuple[Progress, ...] = (),
    ) -> AsyncIterator[UploadFrame]:
        """Of an upload. The link's rate is taken from when its first chunk was let through on."""
        yield first
        began, moved = None, 0
        for chunk in chunks(payload, manifest, received):
            self.traffic.sent += len(chunk.data)
            yield chunk
            if began is None:
                began = time.monotonic()
            else:
                moved += len(chunk.data)
        if began is not None:
            self.deadlines.took(moved, time.monotonic() - began)

    def _manifest(self, payload: Fragments, codec: CodecName) -> Manifest:
        """The same for the same payload, so that a transfer can go on where it was cut off."""
        known = self._contents.get(id(payload))
        if known is None:
            known = payload, manifest_of(payload, codec)
            self._contents = {id(payload): known}
        return known[1]

    # ------------------------------------------------------------ from the parent

    def _take(self, frame: Said | Offer) -> None:
        match frame:
            case Said(channel, message):
                self._deliver(channel, message)
            case Offer():
                assert self._tasks is not None
                kind = type(frame.message)
                if (earlier := self._downloads.get(kind)) is not None:
                    earlier.cancel()  # a newer one takes its place
                self._downloads[kind] = self._tasks.create_task(self._fetch(frame))

    async def _fetch(self, offer: Offer) -> None:
        if problem := check_manifest(offer.manifest, self._layout):
            log.error("%s offers what is no model of this run: %s", self.address, problem)
            raise LinkEnded
        content = offer.manifest.content
        staging = self._partial.get(content) or Staging(offer.manifest)
        self._partial = {content: staging}
        try:
            payload = await self._download(offer, staging)
        except ValueError as error:
            self._partial.pop(content, None)
            log.error("what %s sent is damaged: %s", self.address, error)
            raise LinkEnded from error
        self._partial.pop(content, None)
        self._outgoing.put_nowait(Fetched(offer.transfer))
        assert isinstance(offer.message, Assignment | Resumed | PushAnswer)
        self._deliver(Channel.NODE, replace(offer.message, payload=payload))

    async def _download(self, offer: Offer, staging: Staging) -> Fragments:
        size = sum(header.elements for header in offer.manifest.fragments) * 4
        began, moved = time.monotonic(), 0
        request = Fetch(offer.transfer, staging.received())
        stream = self.stub(bulk=True).stream(
            "Download", request, metadata=self.metadata(), timeout=self.deadlines.of(size)
        )
        async for chunk in stream:
            staging.add(chunk)
            moved += len(chunk.data)
            self.traffic.received += len(chunk.data)
        self.deadlines.took(moved, time.monotonic() - began)
        return staging.take()


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """Without the frames that it came through: they hold whole models, and it is kept a while."""
    error = group.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first(error)
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
