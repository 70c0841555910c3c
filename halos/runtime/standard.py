"""gRPC's standard services at a server: health, for probes, and reflection, for tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from halos.wire.serde import SERVICE_NAMES


class StandardServices:
    """``called`` hears of each call's peer, as for our own methods."""

    def __init__(self, server: grpc.aio.Server, called: Callable[[str], None]) -> None:
        self._health = _Health(called)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            _Reflection(names, called), server
        )

    async def serving(self) -> None:
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def leaving(self) -> None:
        """From now on probes hear that nothing is served here."""
        await self._health.enter_graceful_shutdown()


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    def __init__(self, called: Callable[[str], None]) -> None:
        super().__init__()
        self._called = called

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  gRPC's name
        self._called(context.peer())
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        self._called(context.peer())
        await super().Watch(request, context)


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    def __init__(self, names: tuple[str, ...], called: Callable[[str], None]) -> None:
        super().__init__(names)
        self._called = called

    async def ServerReflectionInfo(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], unused_context: Any
    ) -> AsyncIterator[Any]:
        self._called(unused_context.peer())
        async for answer in super().ServerReflectionInfo(request_iterator, unused_context):
            yield answer
