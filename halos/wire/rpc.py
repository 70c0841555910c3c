"""The services as gRPC methods over plain frames: handlers at one end, a stub at the other."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from halos.wire.serde import METHODS, MalformedMessage, Method

log = logging.getLogger(__name__)

KEEPALIVE_S = 20.0
"""A connection that is silent for so long is asked whether it lives, and has as long to answer.

For both ends: below what gateways cut idle connections at, and permitted by the other end.
"""

CONNECT_S = 10.0  # that an attempt to connect may take: several round trips, with TLS
Options = tuple[tuple[str, int], ...]


def client_options() -> Options:
    """Of a channel to a server."""
    return (
        *_keepalive(),
        ("grpc.enable_retries", 0),  # repeats are ours: they have to be known for what they are
        ("grpc.min_reconnect_backoff_ms", int(1000 * CONNECT_S)),  # also limits the attempt itself
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options() -> Options:
    return (*_keepalive(), ("grpc.so_reuseport", 0))


def _keepalive() -> Options:
    asked_ms = int(1000 * KEEPALIVE_S)
    return (
        ("grpc.keepalive_time_ms", asked_ms),
        ("grpc.keepalive_timeout_ms", asked_ms),
        # Without it the answer is waited for a minute, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", asked_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", asked_ms // 2),
        ("grpc.http2.min_ping_interval_without_data_ms", asked_ms // 2),
    )


class Stub:
    """The methods of a server, each under its name.

    All raise ``grpc.aio.AioRpcError``, and ``MalformedMessage`` for an answer that is none.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._calls = {name: _multi_callable(channel, m) for name, m in METHODS.items()}

    async def call(self, name: str, request: Any, **options: Any) -> Any:
        """The one answer to ``request``: a frame, or an iterator of frames."""
        return METHODS[name].decode_reply(await self._calls[name](request, **options))

    async def stream(self, name: str, request: Any, **options: Any) -> AsyncIterator[Any]:
        """All answers to one request."""
        call = self._calls[name](request, **options)
        try:
            async for data in call:
                yield METHODS[name].decode_reply(data)
        finally:
            call.cancel()

    def open(self, name: str, **options: Any) -> Conversation:
        """A call whose requests are written one by one."""
        return Conversation(self._calls[name](**options), METHODS[name])


class Conversation:
    """A stream both ways: frames are written, and iterated over."""

    def __init__(self, call: Any, method: Method) -> None:
        self._call = call
        self._method = method
        self.done_writing = call.done_writing
        self.cancel = call.cancel

    async def write(self, frame: Any) -> None:
        await self._call.write(frame)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for data in self._call:
            yield self._method.decode_reply(data)


def _multi_callable(channel: grpc.aio.Channel, method: Method) -> Any:
    make: Any = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[method.request_stream, method.response_stream]
    # Answers are decoded above: gRPC would swallow what is wrong with them.
    path = f"/{method.service}/{method.name}"
    return make(path, request_serializer=method.encode_request, response_deserializer=None)


def generic_handlers(behaviours: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """Handlers of all services, from one coroutine or async generator a method.

    Each gets a frame, or an iterator of frames, and the context. The iterator raises
    ``MalformedMessage``; a single request that is none is answered with INVALID_ARGUMENT.
    """
    services: dict[str, dict[str, Any]] = {}
    for name, behaviour in behaviours.items():
        method = METHODS[name]
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.request_stream, method.response_stream]
        services.setdefault(method.service, {})[name] = make(
            _decoding(method, behaviour),
            request_deserializer=None,
            response_serializer=method.encode_reply,
        )
    return [grpc.method_handlers_generic_handler(s, h) for s, h in services.items()]


def _decoding(method: Method, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """``behaviour`` of frames, as gRPC calls it with bytes."""
    if method.request_stream:

        async def of_stream(requests: AsyncIterator[bytes], context: Any) -> Any:
            return await behaviour(_decoded(method, requests), context)

        return of_stream

    async def frame_of(data: bytes, context: Any) -> Any:
        try:
            return method.decode_request(data)
        except MalformedMessage as error:
            log.warning("refused %s: %s", context.peer(), error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def of_one(data: bytes, context: Any) -> Any:
        return await behaviour(await frame_of(data, context), context)

    async def of_one_to_many(data: bytes, context: Any) -> AsyncIterator[Any]:
        async for answer in behaviour(await frame_of(data, context), context):
            yield answer

    return of_one_to_many if method.response_stream else of_one


async def _decoded(method: Method, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield method.decode_request(data)
