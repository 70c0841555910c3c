"""An asyncio event loop in a thread of its own: where all sockets of a process live."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc.aio

log = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for threads that have no loop."""

    def __init__(self, name: str = "network") -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_unheard)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for ``coroutine``'s result. ``KeyboardInterrupt`` cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Have ``function`` called in the loop; nothing happens once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._loop.is_closed():
            return
        self.submit(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


def _unheard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC fails so where a peer is gone in the moment that it is answered, and tells nobody."""
    error = context.get("exception")
    if isinstance(error, grpc.aio.InternalError):
        log.debug("a peer was gone before it was answered: %s", error)
    else:
        loop.default_exception_handler(context)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
