"""An emulated network link: a TCP proxy with a rate and a round-trip time, which can be cut.

``up`` is from who connects to the link towards its target, ``down`` the way back. All connections
through a link share its rate, each direction having that of its own. Bytes count as carried when
they are handed to the far side; what TCP and IP add to them is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field

from halos.core.settings import Settings
from halos.errors import UserError
from halos.wire.relay import Lane, close_by_reset, relay

Direction = Literal["up", "down"]
CutMode = Literal["drop", "reset"]
T = TypeVar("T")

RETRY_S = 0.25  # before a target that is not there is tried again
PATIENCE_S = 30.0  # until the connection that wanted it is closed
BACKLOG = 512

logger = logging.getLogger(__name__)


class LinkSettings(Settings):
    """``rate_mbps``: megabits a second, each way; None: no limit. ``rtt_ms``: half of it a way."""

    rate_mbps: float | None = Field(default=None, gt=0)
    rtt_ms: float = Field(default=0.0, ge=0)

    def __str__(self) -> str:
        rate = "no limit" if self.rate_mbps is None else f"{self.rate_mbps:g} Mbit/s each way"
        return f"{rate}, round trip {self.rtt_ms:g} ms"


class Carried(NamedTuple):
    """Bytes that have come out of a link's far end, a direction."""

    up: int
    down: int


class Link:
    """A link from ``listen`` to ``to`` (HOST:PORT; port 0 of ``listen``: any that is free).

    To be used inside one event loop. The target's name need not resolve before somebody connects;
    it is then tried for ``patience_s``. A new connection costs a round trip first, as a handshake.
    """

    def __init__(
        self, listen: str, to: str, settings: LinkSettings, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Raises ``UserError`` if an address is not of the form HOST:PORT."""
        self.settings = settings
        self._listen, self._to = split_address("listen", listen), split_address("to", to)
        self._patience_s = patience_s
        rate = None if settings.rate_mbps is None else settings.rate_mbps * 1e6 / 8
        self._lanes = {way: Lane(rate, settings.rtt_ms / 2000) for way in ("up", "down")}
        self._whole, self._parted = asyncio.Event(), asyncio.Event()
        self._whole.set()
        self._refuses = False
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._away = False  # the target, and that has been said

    # ------------------------------------------------------------ from start to end

    @property
    def address(self) -> str:
        """Where it listens: HOST:PORT, with the port that it really has."""
        assert self._listener is not None, "the link has not been started"
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        """Listen. Raises ``UserError`` if the address cannot be had."""
        host, port = self._listen
        try:
            family, kind, *_, place = (await resolve(host, port))[0]
            listener = socket.socket(family, kind)
        except OSError as error:
            raise UserError(f"listen: {host}:{port} cannot be used: {reason(error)}") from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._lanes["up"].tune(listener)  # what it accepts inherits that
            listener.setblocking(False)
            listener.bind(place)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise UserError(
                f"listen: {host}:{port} cannot be used: {reason(error)}; give another, or port 0"
            ) from error
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """Stop listening, and reset the connections that there still are."""
        tasks = list(self._connections)
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ carried and cut

    @property
    def carried(self) -> Carried:
        return Carried(self._lanes["up"].carried, self._lanes["down"].carried)

    @property
    def is_cut(self) -> bool:
        return not self._whole.is_set()

    def cut(self, mode: CutMode = "drop") -> None:
        """Let nothing pass until :meth:`mend`.

        ``drop``: as if a cable were pulled. Both sides see silence, new connections hang; what TCP
        would send again arrives after the mending. ``reset``: connections and attempts at new ones
        are reset, what was under way is lost.
        """
        for lane in self._lanes.values():
            lane.cut_after(None, None)
        self._whole.clear()
        self._parted.set()
        self._refuses = mode == "reset"
        if self._refuses:
            for connection in self._connections:
                connection.cancel()

    def cut_after(self, size: int, direction: Direction, mode: CutMode = "drop") -> None:
        """Cut once exactly ``size`` more bytes have been carried in ``direction``.

        With ``reset``, of these the last may be lost that the receiver's socket had no room for.
        """
        if size <= 0:
            self.cut(mode)
        else:
            self._lanes[direction].cut_after(size, partial(self.cut, mode))

    def mend(self) -> None:
        self._refuses = False
        self._parted.clear()
        self._whole.set()

    async def until_cut(self) -> None:
        """Wait for what :meth:`cut_after` has announced."""
        await self._parted.wait()

    # ------------------------------------------------------------ connections

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(listener)
            except OSError as error:  # such as no more file descriptors
                logger.warning("%s cannot accept a connection: %s", self.address, reason(error))
                await asyncio.sleep(RETRY_S)
                continue
            if self._refuses:
                close_by_reset(near)
                continue
            task = asyncio.create_task(self._carry(near))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _carry(self, near: socket.socket) -> None:
        """One connection from beginning to end."""
        with contextlib.ExitStack() as abrupt:
            abrupt.callback(close_by_reset, near)
            self._lanes["up"].tune(near)
            await asyncio.sleep(self.settings.rtt_ms / 1000)
            await self._whole.wait()
            far = await self._connect_patiently()
            if far is None:
                return
            abrupt.callback(close_by_reset, far)
            if await relay(near, far, self._lanes["up"], self._lanes["down"], self._whole):
                abrupt.pop_all()
                near.close()
                far.close()

    async def _connect_patiently(self) -> socket.socket | None:
        host, port = self._to
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        while True:
            try:
                far = await self._connect(host, port)
            except OSError as error:
                if not self._away:  # once an outage, however many connections wait
                    text = "%s:%s cannot be reached: %s; trying again every %g s, for %g s"
                    logger.warning(text, host, port, reason(error), RETRY_S, self._patience_s)
                self._away = True
            else:
                self._away = False
                return far
            if loop.time() >= give_up:
                return None
            await asyncio.sleep(RETRY_S)

    async def _connect(self, host: str, port: int) -> socket.socket:
        """To the first of the target's addresses that answers."""
        failure = OSError("its name has no address")
        for family, kind, *_, place in await resolve(host, port):
            far = socket.socket(family, kind)
            try:
                far.setblocking(False)
                self._lanes["down"].tune(far)
                await asyncio.get_running_loop().sock_connect(far, place)
            except OSError as error:
                far.close()
                failure = error
            except BaseException:
                far.close()
                raise
            else:
                return far
        raise failure


class LinkThread:
    """A :class:`Link` in a thread of its own, for those who have no event loop."""

    def __init__(
        self, listen: str, to: str, settings: LinkSettings, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Raises ``UserError`` if an address is not of the form HOST:PORT."""
        self._link = Link(listen, to, settings, patience_s=patience_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Listen. Raises ``UserError`` if the address cannot be had."""
        self._thread.start()
        try:
            self._run(self._link.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, and reset the connections that there still are."""
        self._run(self._link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def carried(self) -> Carried:
        return self._link.carried

    @property
    def is_cut(self) -> bool:
        return self._link.is_cut

    def cut(self, mode: CutMode = "drop") -> None:
        self._run(self._do(partial(self._link.cut, mode)))

    def cut_after(self, size: int, direction: Direction, mode: CutMode = "drop") -> None:
        self._run(self._do(partial(self._link.cut_after, size, direction, mode)))

    def mend(self) -> None:
        self._run(self._do(self._link.mend))

    def wait_until_cut(self, timeout_s: float | None = None) -> None:
        """Raises ``TimeoutError`` if what :meth:`cut_after` has announced does not come."""
        self._run(asyncio.wait_for(self._link.until_cut(), timeout_s))

    async def _do(self, change: Callable[[], None]) -> None:
        change()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def split_address(field: str, address: str) -> tuple[str, int]:
    """HOST:PORT or [HOST]:PORT. Raises ``UserError``, which names ``field``."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise UserError(f'{field}: "{address}" is not allowed; give HOST:PORT')
    return host, int(port)


async def resolve(host: str, port: int) -> list[Any]:
    """Addresses as :func:`socket.getaddrinfo` gives them. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def reason(error: OSError) -> str:
    """In the system's words; asyncio has others, with the address once more in them."""
    if error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)
