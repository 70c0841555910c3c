"""The gRPC server of a coordinator or region: who may call, and what each call is answered with.

A method here admits the caller, calls one thing, and turns what was wrong into a status.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from halos.core.fragments import Fragments
from halos.core.messages import NodeId
from halos.core.topology import Topology
from halos.errors import UserError
from halos.runtime.children import Child, Children, Unacceptable
from halos.runtime.handshakes import Handshakes
from halos.runtime.repeats import Repeats
from halos.runtime.standard import StandardServices
from halos.wire.frames import (
    CHUNK_BYTES,
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    Begin,
    Begun,
    Chunk,
    Commit,
    Evaluation,
    Fetch,
    Greeting,
    Header,
    Hello,
    Hold,
    Observe,
    Observed,
    Uploaded,
    UploadFrame,
)
from halos.wire.rpc import generic_handlers, server_options
from halos.wire.security import Security, split_address

log = logging.getLogger(__name__)

CHOSEN = "an address that is free, such as --listen 127.0.0.1:0"
RESERVED_S = 60.0  # a name is kept for who said hello, while it makes itself ready
OBSERVING_S = 600.0
STOP_S = 5.0
PLAIN_NAME = re.compile(r"[\w-]+(/[\w-]+)*")
Context = grpc.aio.ServicerContext[Any, Any]


class TakenNameError(Exception):
    """Another living process goes by the name that was asked for."""


@dataclass
class Observation:
    """A model to look at; ``payload`` is ``None`` when nothing newer will come."""

    about: Observed
    payload: Fragments | None


@dataclass
class Answers:
    """What a server answers beyond its children's exchange. ``greeting``: but for the name."""

    greeting: Greeting
    topology: Topology
    constants: bytes
    status: Callable[[], dict[str, Any]]
    observe: Callable[[Observe], Awaitable[Observation]] | None = None
    evaluated: Callable[[Evaluation], None] | None = None


class Serving:
    """Listens from :meth:`start` to :meth:`stop`, both in the event loop."""

    def __init__(self, children: Children, security: Security, answers: Answers) -> None:
        self.children = children
        self.security = security
        self.answers = answers
        self.address = ""
        self._handshakes = Handshakes()
        self._refusals = Repeats()
        self._tasks: list[asyncio.Task[None]] = []
        behaviours = {
            "Hello": self._unary(self._hello),
            "Talk": self._talk,
            "Begin": self._unary(self._begin),
            "Upload": self._unary(self._upload),
            "Commit": self._unary(self._commit),
            "Download": self._stream(self._download),
            "Constants": self._stream(self._constants),
            "Status": self._unary(self._status),
            "Observe": self._unary(self._observe),
            "ReportEvaluation": self._unary(self._evaluated),
        }
        self._handlers = generic_handlers(behaviours)

    async def start(self, listen: str) -> str:
        """Begin to listen. Returns the address, with the port that was chosen if it was 0."""
        self._server = grpc.aio.server(options=server_options())
        self._server.add_generic_rpc_handlers(tuple(self._handlers))
        self._standard = StandardServices(self._server, self._handshakes.called)
        credentials = self.security.server_credentials(self._handshakes.begun)
        check_free(listen)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise UserError(f"--listen {listen}: cannot be listened on; give {CHOSEN}") from error
        await self._server.start()
        await self._standard.serving()
        watches = (self.children.sweep(), self._handshakes.watch())
        self._tasks = [asyncio.create_task(watch) for watch in watches]
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        return self.address

    async def stop(self) -> None:
        """Refuse new calls, end the streams, and let calls under way have a few seconds."""
        for task in self._tasks:
            task.cancel()
        await self._standard.leaving()
        stopping = asyncio.ensure_future(self._server.stop(STOP_S))
        for child in self.children.here():
            self.children.hang_up(child.name)
        await stopping

    # ------------------------------------------------------------ every call

    def _unary(self, answer: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Any]:
        @functools.wraps(answer)
        async def method(request: Any, context: Context) -> Any:
            await self._admit(context)
            try:
                return await answer(request, context)
            except (Unacceptable, ValueError, TakenNameError) as error:
                refused = _alone(error)
            return await self._abort(context, refused)

        return method

    def _stream(self, answer: Callable[[Any, Context], AsyncIterator[Any]]) -> Callable[..., Any]:
        @functools.wraps(answer)
        async def method(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._admit(context)
            try:
                async for item in answer(request, context):
                    yield item
                return
            except (Unacceptable, ValueError) as error:
                refused = _alone(error)
            await self._abort(context, refused)

        return method

    async def _admit(self, context: Context, wanted: str = "observer") -> None:
        """``wanted`` is what the caller wants to be; whoever is of this run may look at it."""
        self._handshakes.called(context.peer())
        refusal = self.security.refusal(_metadata(context), context.auth_context(), wanted)
        if refusal is not None:
            await self._refuse(context, *refusal)

    async def _abort(self, context: Context, error: Exception) -> Any:
        match error:
            case TakenNameError():
                status = grpc.StatusCode.ALREADY_EXISTS
            case Unacceptable(retry=True):
                status = grpc.StatusCode.ABORTED
            case Unacceptable():
                status = grpc.StatusCode.INVALID_ARGUMENT
            case _:
                status = grpc.StatusCode.DATA_LOSS
        await self._refuse(context, status, str(error))

    async def _refuse(self, context: Context, status: grpc.StatusCode, detail: str) -> Any:
        """Say it here too, if it is news: who is refused tends to try again."""
        peer = unquote(context.peer()).partition(":")[2]
        if self._refusals.news(f"{peer.rpartition(':')[0]} {detail}"):
            log.warning("refused %s: %s", peer, detail)
        await context.abort(status, detail)

    def _caller(self, context: Context) -> Child:
        given = dict(_metadata(context))
        name, instance = given.get("halos-node-bin", b""), given.get("halos-instance-bin", b"")
        assert isinstance(name, bytes) and isinstance(instance, bytes)
        return self.children.find(name.decode(errors="replace"), instance)

    # ------------------------------------------------------------ for children

    async def _hello(self, hello: Hello, context: Context) -> Greeting:
        mine = self.answers.greeting
        protocol = min(NEWEST_PROTOCOL, hello.newest_protocol)
        if protocol < max(OLDEST_PROTOCOL, hello.oldest_protocol):
            raise Unacceptable(
                f"it speaks wire protocols {hello.oldest_protocol} to {hello.newest_protocol}, "
                f"this server {OLDEST_PROTOCOL} to {NEWEST_PROTOCOL}; bring the older up to date"
            )
        await self._admit(context, hello.role)
        if hello.run and hello.run != mine.run:
            raise Unacceptable(f"this is a server of run {mine.run!r}, not of {hello.run!r}")
        name = self._name_for(hello)
        self.children.expect(
            name,
            hello.role,
            hello.instance,
            OBSERVING_S if hello.role == "observer" else RESERVED_S,
        )
        return replace(mine, protocol=protocol, name=name)

    def _name_for(self, hello: Hello) -> NodeId:
        """The name that a child goes by. A region's and a worker's are places of the run's tree."""
        here, topology = self.answers.greeting.server, self.answers.topology
        if hello.role == "observer":
            return hello.name or f"observer {hello.instance.hex()[:8]}"
        if hello.role == "server":
            regions = [s.name for s in topology.servers if s.parent == here]
            if hello.name not in regions:
                raise Unacceptable(
                    f"{hello.name!r} is no region below {here}; give --region one of "
                    f"{', '.join(regions) or 'none: it has no regions'}"
                )
            return self._unless_taken(hello.name, hello.instance)
        if hello.name:
            name = hello.name if hello.name.startswith(f"{here}/") else f"{here}/{hello.name}"
            if not PLAIN_NAME.fullmatch(name):
                raise Unacceptable(f"--name {hello.name!r}: give letters, digits, - and _")
            return self._unless_taken(name, hello.instance)
        places = [w.name for w in topology.workers if w.parent == here]
        further = (f"{here}/{number}" for number in range(len(places), 1 << 30))
        candidates = chain(places, further)
        return next(name for name in candidates if self.children.is_free(name, hello.instance))

    def _unless_taken(self, name: NodeId, instance: bytes) -> NodeId:
        if self.children.is_connected(name, instance):
            raise TakenNameError(
                f"{name} is here already as another process; stop that one, or take another name"
            )
        return name

    async def _talk(self, frames: AsyncIterator[Any], context: Context) -> None:
        await self._admit(context)
        try:
            first = await anext(aiter(frames), None)
            if not isinstance(first, Hold):
                raise Unacceptable("a stream begins by saying who talks")
            child = self.children.find(first.name, first.instance)
            log.info("%s is connected (%s)", child.name, context.peer())
            try:
                await self.children.talk(child, frames, context.write)
            finally:  # a peer that is killed ends this by a cancellation
                log.info("%s has left or lost its connection", child.name)
            return
        except (Unacceptable, ValueError) as error:
            refused = _alone(error)
        await self._abort(context, refused)

    async def _begin(self, request: Begin, context: Context) -> Begun:
        child = self._caller(context)
        self._check(child, request.header)
        return await self.children.begin(child, request)

    def _check(self, child: Child, header: Header) -> None:
        """Raise ``Unacceptable`` for an update that is not of this run, or not of this child."""
        mine = self.answers.greeting
        if header.run != mine.run or header.specification_version != mine.specification_version:
            raise Unacceptable("the run's specification is another by now", retry=True)
        if header.sender != child.name:
            raise Unacceptable(f"{child.name} cannot send an update of {header.sender}")

    async def _upload(self, frames: AsyncIterator[UploadFrame], context: Context) -> Uploaded:
        child = self._caller(context)

        async def checked() -> AsyncIterator[UploadFrame]:
            async for frame in frames:
                if isinstance(frame, Begin):
                    self._check(child, frame.header)
                yield frame

        return await self.children.upload(child, checked())

    async def _commit(self, request: Commit, context: Context) -> None:
        self.children.commit(self._caller(context), request)

    async def _download(self, request: Fetch, context: Context) -> AsyncIterator[Chunk]:
        child = self._caller(context)
        async for chunk in self.children.download(child, request):
            yield chunk
        if child.role == "observer":
            self.children.fetched(child, request.transfer)

    async def _constants(self, _: None, context: Context) -> AsyncIterator[bytes]:
        blob = self.answers.constants
        for start in range(0, len(blob), CHUNK_BYTES):
            yield blob[start : start + CHUNK_BYTES]

    # ------------------------------------------------------------ for people and observers

    async def _status(self, _: None, context: Context) -> str:
        return json.dumps(self.answers.status())

    async def _observe(self, request: Observe, context: Context) -> Observed:
        if self.answers.observe is None:
            raise Unacceptable("models are observed at the coordinator; give its address")
        child = self._caller(context)
        self.children.expect(child.name, "observer", child.instance, OBSERVING_S)
        seen = await self.answers.observe(request)
        if seen.payload is None:
            return seen.about
        transfer, manifest = self.children.pin(child, seen.payload)
        return replace(seen.about, transfer=transfer, manifest=manifest)

    async def _evaluated(self, evaluation: Evaluation, context: Context) -> None:
        if self.answers.evaluated is None:
            raise Unacceptable("evaluations are kept by the coordinator; give its address")
        self._caller(context)
        self.answers.evaluated(evaluation)


def check_free(listen: str) -> None:
    """Raise ``UserError`` if nobody can listen there; gRPC does not say why."""
    host, port = split_address(listen)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except OSError as error:
        raise UserError(
            f"--listen {listen}: cannot be listened on ({error.strerror}); give {CHOSEN}"
        ) from error


def _alone(error: Exception) -> Exception:
    """The error without the frames that it came through.

    gRPC keeps what a call was aborted with in a cycle with the call. The frames hold all that has
    come of an update, which would stay until Python next looks for cycles. (For the same reason
    nothing is aborted while an error is being handled.)
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _metadata(context: Context) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in context.invocation_metadata() or ())
