"""Questions to a running server, from people and scripts. Needs no torch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from halos.errors import UserError
from halos.wire.rpc import Stub, client_options
from halos.wire.security import Security, explain

ANSWER_S = 10.0
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
    async with dial(address, security) as channel:
        call = Stub(channel).call("Status", None, metadata=security.metadata(), timeout=timeout_s)
        try:
            return json.loads(await call)
        except grpc.aio.AioRpcError as error:
            raise UserError(explain(error, address, security)) from None


async def ask_health(address: str, security: Security, timeout_s: float = ANSWER_S) -> bool:
    """Whether a server serves, by the standard health service. Raises ``UserError``."""
    async with dial(address, security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        try:
            reply = await stub.Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise UserError(explain(error, address, security)) from None
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def status_of_server(address: str, security: Security) -> Any:
    """:func:`ask_status`, from where no event loop runs."""
    return asyncio.run(ask_status(address, security))


def announced(folder: Path) -> str | None:
    """The address that the process of this directory said it listens on, if any."""
    try:
        return (folder / ADDRESS).read_text().strip() or None
    except OSError:
        return None
