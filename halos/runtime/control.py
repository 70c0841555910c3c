"""Questions to a running server, from people and scripts. Needs no torch."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from halos.errors import UserError
from halos.wire.rpc import Stub, client_options
from halos.wire.security import Security, explain, was_closed

log = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_S = 10.0
CLOSED_TRIES = 4
AGAIN_S = 0.25
ADDRESS = "address"  # the file in a process's directory that says where it listens


def dial(address: str, security: Security) -> grpc.aio.Channel:
    """A channel to a server; nothing is connected yet. Call it where an event loop runs."""
    credentials = security.channel_credentials()
    options = (*client_options(), *security.channel_options())
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def ask_status(address: str, security: Security, timeout_s: float = ANSWER_S) -> Any:
    """What a server tells of itself and those below it. Raises ``UserError``."""

    async def ask(channel: grpc.aio.Channel) -> Any:
        call = Stub(channel).call("Status", None, metadata=security.metadata(), timeout=timeout_s)
        return json.loads(await call)

    return await _answer(address, security, ask)


async def ask_health(address: str, security: Security, timeout_s: float = ANSWER_S) -> bool:
    """Whether a server serves, by the standard health service. Raises ``UserError``."""

    async def ask(channel: grpc.aio.Channel) -> bool:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return await _answer(address, security, ask)


async def _answer(
    address: str, security: Security, ask: Callable[[grpc.aio.Channel], Awaitable[T]]
) -> T:
    """What ``ask`` hears over a connection of its own. Raises ``UserError``.

    A connection that was closed is tried again: only one that is closed every time tells that the
    other end will not have us, rather than that it was busy, or lost it on the way.
    """
    for attempt in range(1, CLOSED_TRIES + 1):
        async with dial(address, security) as channel:
            try:
                return await ask(channel)
            except grpc.aio.AioRpcError as error:
                log.debug("%s: %s", address, error.debug_error_string())
                if attempt == CLOSED_TRIES or not was_closed(error):
                    raise UserError(explain(error, address, security)) from None
        await asyncio.sleep(AGAIN_S)
    raise AssertionError("the last try returns or raises")


def status_of_server(address: str, security: Security) -> Any:
    """:func:`ask_status`, from where no event loop runs."""
    return asyncio.run(ask_status(address, security))


def announced(folder: Path) -> str | None:
    """The address that the process of this directory said it listens on, if any."""
    try:
        return (folder / ADDRESS).read_text().strip() or None
    except OSError:
        return None
