"""The services as gRPC methods over plain frames: handlers at one end, a stub at the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from halos.wire.serde import METHODS, Method

KEEPALIVE = (
    # Below what gateways cut idle connections at, and permitted by the other end.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
CLIENT_OPTIONS = (
    *KEEPALIVE,
    ("grpc.enable_retries", 0),  # repeats are ours: they have to be known for what they are
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (*KEEPALIVE, ("grpc.so_reuseport", 0))


class Stub:
    """The methods of a server, each under its name: ``await stub.call("Hello", frame)``."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._calls = {name: _multi_callable(channel, m) for name, m in METHODS.items()}

    def call(self, name: str, request: Any, **options: Any) -> Any:
        """A call object of ``grpc.aio``. ``request``: a frame, or an iterator of frames."""
        return self._calls[name](request, **options)

    def open(self, name: str, **options: Any) -> Any:
        """A call whose requests are written one by one."""
        return self._calls[name](**options)


def _multi_callable(channel: grpc.aio.Channel, method: Method) -> Any:
    make: Any = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[method.request_stream, method.response_stream]
    return make(
        f"/{method.service}/{method.name}",
        request_serializer=method.encode_request,
        response_deserializer=method.decode_reply,
    )


def generic_handlers(behaviours: dict[str, Callable[..., Any]]) -> list[grpc.GenericRpcHandler]:
    """Handlers of all services, from one coroutine or async generator a method."""
    services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for name, behaviour in behaviours.items():
        method = METHODS[name]
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.request_stream, method.response_stream]
        services.setdefault(method.service, {})[name] = make(
            behaviour,
            request_deserializer=method.decode_request,
            response_serializer=method.encode_reply,
        )
    return [grpc.method_handlers_generic_handler(s, h) for s, h in services.items()]
