"""A link's rate, round trip and cuts, with real sockets.

The two claims about time are the only ones here that look at a clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, closing, contextmanager, suppress

import grpc
import pytest

from halos.errors import UserError
from halos.wire.link import CutMode, Direction, Link, LinkSettings, LinkThread, split_address
from halos.wire.relay import Lane, close_by_reset

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]

FREE = LinkSettings()
MB = 1_000_000


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def to_its_end(serve: Serve) -> Serve:
    """``serve`` and then hang up, also when the other side does so first."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await serve(reader, writer)
        await leave(writer)

    return once


@asynccontextmanager
async def link_to(serve: Serve, settings: LinkSettings = FREE) -> AsyncIterator[Link]:
    """A link to a server that handles each connection with ``serve``."""
    server = await asyncio.start_server(to_its_end(serve), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, Link("127.0.0.1:0", f"{host}:{port}", settings) as link:
        yield link


@asynccontextmanager
async def connected(link: Link) -> AsyncIterator[Ends]:
    reader, writer = await asyncio.open_connection(*split_address("to", link.address))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # whatever has not been sent by now
        await leave(writer)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def answered(ends: Ends, text: bytes = b"ping") -> bytes:
    reader, writer = ends
    writer.write(text)
    return await reader.readexactly(len(text))


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


class Peer:
    """A server of one connection, which the test takes into its own hands."""

    def __init__(self) -> None:
        self._ends: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()

    async def __call__(self, *ends: *Ends) -> None:
        self._ends.set_result(ends)
        await self._done.wait()

    @asynccontextmanager
    async def ends(self) -> AsyncIterator[Ends]:
        try:
            yield await self._ends
        finally:
            self._done.set()


@asynccontextmanager
async def both_ends(settings: LinkSettings = FREE) -> AsyncIterator[tuple[Link, Ends, Ends]]:
    """A link, and a connection through it by its near and its far end."""
    peer = Peer()
    async with link_to(peer, settings) as link, connected(link) as near, peer.ends() as far:
        yield link, near, far


# ---------------------------------------------------------------- rate and round trip


def test_bytes_leave_one_after_the_other_at_the_rate() -> None:
    lane = Lane(rate=1e6, delay_s=0.0)
    assert lane.departure(500_000, ready=10.0) == 10.5
    assert lane.departure(250_000, ready=10.0) == 10.75  # behind the others
    assert lane.departure(250_000, ready=10.75) == 11.0
    assert lane.departure(1_000_000, ready=20.0) == 21.0  # no credit for having been idle
    assert Lane(rate=None, delay_s=0.0).departure(1 << 40, ready=10.0) == 10.0


TRANSFER_S = 2.0
RATE = LinkSettings(rate_mbps=20)
IN_TIME = int(TRANSFER_S * 20e6 / 8)  # bytes


async def seconds_both_ways(connections: int) -> float:
    """To move ``IN_TIME`` bytes up and as many down, over so many connections in all."""
    each = bytes(IN_TIME // connections)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, received = await asyncio.gather(send(writer, each), reader.read(-1))
        assert len(received) == len(each)

    async with link_to(serve, RATE) as link:

        async def exchange() -> None:
            async with connected(link) as (reader, writer):
                _, received = await asyncio.gather(send(writer, each), reader.read(-1))
                assert len(received) == len(each)

        started = time.monotonic()
        await asyncio.gather(*(exchange() for _ in range(connections)))
        assert link.carried == (len(each) * connections,) * 2
        return time.monotonic() - started


@pytest.mark.parametrize("connections", [1, 8])
def test_each_direction_has_the_rate_and_connections_share_it(connections: int) -> None:
    taken: list[float] = []
    for _ in range(5):  # a busy machine may be late, but the link is never fast
        taken.append(asyncio.run(seconds_both_ways(connections)))
        assert taken[-1] > 0.85 * TRANSFER_S
        if taken[-1] < 1.15 * TRANSFER_S:
            return
    pytest.fail(f"{TRANSFER_S} s expected, taken: {taken}")


def test_a_round_trip_takes_its_time() -> None:
    rtt_s = 0.06

    async def main() -> None:
        async with (
            link_to(echo, LinkSettings(rate_mbps=1000, rtt_ms=rtt_s * 1000)) as link,
            connected(link) as ends,
        ):
            await answered(ends)
            taken = []
            for _ in range(10):
                started = time.monotonic()
                await answered(ends)
                taken.append(time.monotonic() - started)
            assert rtt_s <= min(taken) < 3 * rtt_s

    asyncio.run(main())


def test_a_short_message_overtakes_the_bulk_of_another_connection() -> None:
    async def main() -> None:
        async with (
            link_to(echo, LinkSettings(rate_mbps=20)) as link,
            connected(link) as (_, bulk),
            connected(link) as ends,
        ):
            bulk.write(bytes(20 * MB))  # eight seconds of it
            await answered(ends)
            assert link.carried.up < 2 * MB

    asyncio.run(main())


# ---------------------------------------------------------------- every byte, in order


@pytest.mark.parametrize("settings", [FREE, LinkSettings(rate_mbps=200, rtt_ms=10)], ids=str)
def test_bytes_arrive_as_they_were_sent(settings: LinkSettings) -> None:
    up, down = os.urandom(5 * MB), os.urandom(5 * MB)

    async def main() -> None:
        async with both_ends(settings) as (link, near, far):
            *_, at_near, at_far = await asyncio.gather(
                send(near[1], up), send(far[1], down), near[0].read(-1), far[0].read(-1)
            )
            assert hashlib.sha256(at_near).digest() == hashlib.sha256(down).digest()
            assert hashlib.sha256(at_far).digest() == hashlib.sha256(up).digest()
            assert link.carried == (len(up), len(down))

    asyncio.run(main())


def test_one_direction_may_end_before_the_other() -> None:
    async def main() -> None:
        async with both_ends() as (_, near, far):
            await send(near[1], b"question")
            assert await far[0].read(-1) == b"question"
            await send(far[1], b"answer")
            assert await near[0].read(-1) == b"answer"

    asyncio.run(main())


def test_many_connections() -> None:
    async def main() -> None:
        async with link_to(echo) as link:

            async def ask(number: int) -> None:
                async with connected(link) as ends:
                    text = f"{number:04}".encode() * 1000
                    assert await answered(ends, text) == text

            await asyncio.gather(*(ask(number) for number in range(100)))
            assert link.carried == (400_000, 400_000)

    asyncio.run(main())


def test_who_is_not_read_from_is_stopped() -> None:
    offered, most = 96 * MB, 48 * MB  # the most that the kernel's buffers and ours could hold

    async def main() -> None:
        async with (
            both_ends() as (link, (_, writer), (reader, _)),
            connected(link),  # another connection is there, and takes nothing from the first
        ):
            taken = 0

            async def push() -> None:
                nonlocal taken
                block = bytes(MB)
                while taken < offered:
                    writer.write(block)
                    await writer.drain()
                    taken += len(block)

            pushing = asyncio.create_task(push())
            await asyncio.wait({pushing}, timeout=1.0)
            assert not pushing.done() and taken < most
            for _ in range(offered // MB):
                await reader.readexactly(MB)
            await pushing
            assert link.carried.up == offered

    asyncio.run(main())


def test_who_is_not_read_from_stops_nobody_else() -> None:
    release = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(4) == b"hold":
            await release.wait()
        else:
            writer.write(b"pong")

    async def main() -> None:
        async with link_to(serve, LinkSettings(rate_mbps=800)) as link, connected(link) as held:
            held[1].write(b"hold" + bytes(50 * MB))
            for _ in range(20):
                async with connected(link) as ends:
                    ends[1].write(b"ping")
                    assert await ends[0].read(-1) == b"pong"
            release.set()

    asyncio.run(main())


# ---------------------------------------------------------------- cut and mended

DATA = os.urandom(1_500_000)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("settings", [FREE, LinkSettings(rate_mbps=100, rtt_ms=4)], ids=str)
def test_a_cut_after_so_many_bytes(
    share: float, direction: Direction, settings: LinkSettings
) -> None:
    before = int(share * len(DATA))

    async def main() -> None:
        async with both_ends(settings) as (link, near, far):
            (_, writer), (reader, _) = (near, far) if direction == "up" else (far, near)
            link.cut_after(before, direction)
            writer.write(DATA)
            writer.write_eof()
            assert await reader.readexactly(before) == DATA[:before]
            await link.until_cut()
            more = asyncio.create_task(reader.readexactly(len(DATA) - before))
            await asyncio.wait({more}, timeout=0.1)
            assert link.is_cut and getattr(link.carried, direction) == before
            assert not more.done()
            link.mend()
            assert await more == DATA[before:]
            assert await reader.read() == b""

    asyncio.run(main())


def test_a_cut_passes_nothing_and_mending_passes_all() -> None:
    async def main() -> None:
        async with link_to(echo) as link, connected(link) as ends:
            await answered(ends)
            link.cut()
            async with connected(link) as later:  # the kernel lets it in, nobody answers
                waiting = {asyncio.create_task(answered(each)) for each in (ends, later)}
                done, _ = await asyncio.wait(waiting, timeout=0.1)
                assert not done and link.carried == (4, 4)
                link.mend()
                assert await asyncio.gather(*waiting) == [b"ping", b"ping"]
            assert link.carried == (12, 12)

    asyncio.run(main())


def test_a_second_cut_takes_the_place_of_the_first() -> None:
    async def main() -> None:
        async with link_to(echo) as link, connected(link) as ends:
            link.cut_after(1_000_000, "up")
            link.cut()
            link.mend()
            assert await answered(ends, bytes(1_000_001)) == bytes(1_000_001)
            link.cut_after(0, "down")
            assert link.is_cut

    asyncio.run(main())


def test_a_cut_that_resets() -> None:
    async def main() -> None:
        async with both_ends() as (link, near, far):
            near[1].write(b"before")
            assert await far[0].readexactly(6) == b"before"
            link.cut("reset")
            for reader, _ in (near, far):
                with pytest.raises(ConnectionResetError):
                    await reader.readexactly(1)
            async with connected(link) as (reader, _):
                with pytest.raises(ConnectionResetError):
                    await reader.readexactly(1)
            assert link.carried == (6, 0)

    asyncio.run(main())


def test_after_a_reset_and_mending_connections_come_through() -> None:
    async def main() -> None:
        async with link_to(echo) as link:
            async with connected(link) as ends:
                link.cut_after(2, "down", "reset")
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await answered(ends)
                assert link.is_cut and link.carried == (4, 2)
            link.mend()
            async with connected(link) as ends:
                await answered(ends)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["drop", "reset"])
def test_a_link_may_be_closed_while_it_is_cut_and_in_use(mode: CutMode) -> None:
    async def main() -> None:
        async with both_ends(LinkSettings(rate_mbps=1, rtt_ms=1000)) as (link, near, _):
            near[1].write(bytes(MB))
            link.cut(mode)
            await link.close()
            with pytest.raises(ConnectionResetError):
                await near[0].readexactly(1)

    asyncio.run(main())


# ---------------------------------------------------------------- what goes wrong at the ends


@contextmanager
def sockets_through_a_link() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        LinkThread("127.0.0.1:0", "{}:{}".format(*server.getsockname()), FREE) as link,
        closing(socket.create_connection(split_address("to", link.address))) as near,
        closing(server.accept()[0]) as far,
    ):
        yield near, far


def test_either_side_hears_that_the_other_has_reset() -> None:
    for resets in ("near", "far"):
        with sockets_through_a_link() as (near, far):
            leaves, stays = (near, far) if resets == "near" else (far, near)
            leaves.sendall(b"last words")
            assert stays.recv(100) == b"last words"
            close_by_reset(leaves)
            with pytest.raises(ConnectionResetError):
                stays.recv(1)


def test_last_words_come_before_the_reset_that_follows_them() -> None:
    """So a client hears why a server refuses it, although it was still sending."""
    with sockets_through_a_link() as (near, far):
        near.sendall(bytes(100_000))  # which nobody reads: closing resets
        assert far.recv(1) == b"\0"
        far.sendall(b"no")
        far.close()
        assert near.recv(100) == b"no"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            near.sendall(bytes(100 * MB))


def test_a_side_that_leaves_in_the_middle_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with link_to(echo) as link:
            async with connected(link) as (_, writer):
                writer.write(bytes(30 * MB))  # and reads nothing of what comes back
                await asyncio.wait({asyncio.create_task(writer.drain())}, timeout=0.1)
                writer.transport.abort()
            while link._connections:
                await asyncio.wait(link._connections)

    asyncio.run(main())


class Heard(logging.Handler):
    """Log lines, and a wait for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.first = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.first.set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger("halos.wire.link")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


def test_a_target_that_comes_later_is_waited_for_and_said_once() -> None:
    async def main() -> None:
        heard = Heard()
        target = socket.socket()
        target.bind(("127.0.0.1", 0))  # which refuses, until it listens
        to = "{}:{}".format(*target.getsockname())
        with heard.listening():
            async with (
                Link("127.0.0.1:0", to, FREE) as link,
                connected(link) as first,
                connected(link) as second,
            ):
                waiting = [asyncio.create_task(answered(each)) for each in (first, second)]
                await heard.first.wait()
                async with await asyncio.start_server(to_its_end(echo), sock=target):
                    assert await asyncio.gather(*waiting) == [b"ping", b"ping"]
        (line,) = heard.lines
        said = "cannot be reached: Connection refused; trying again every 0.25 s, for 30 s"
        assert line == f"{to} {said}"

    asyncio.run(main())


def test_a_name_that_nobody_knows_closes_the_connection() -> None:
    async def main() -> None:
        heard = Heard()
        to = "server.region.invalid:7443"
        async with Link("127.0.0.1:0", to, FREE, patience_s=0) as link:
            with heard.listening():
                async with connected(link) as (reader, _):
                    with pytest.raises(ConnectionResetError):
                        await reader.readexactly(1)
        assert len(heard.lines) == 1
        assert heard.lines[0].startswith(f"{to} cannot be reached: ")

    asyncio.run(main())


@pytest.mark.parametrize("address", ["", "7443", "host", "host:", ":7443", "host:x", "host:65536"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UserError, match=r"^to: .* is not allowed; give HOST:PORT$"):
        Link("127.0.0.1:0", address, FREE)


def test_addresses_with_names_and_colons() -> None:
    assert split_address("to", "eu.example:7443") == ("eu.example", 7443)
    assert split_address("to", "[::1]:7443") == ("::1", 7443)


def test_an_address_that_is_taken() -> None:
    with LinkThread("127.0.0.1:0", "127.0.0.1:1", FREE) as link:
        second = LinkThread(link.address, "127.0.0.1:1", FREE)
        with pytest.raises(UserError, match=r"^listen: .* in use; give another, or port 0$"):
            second.start()


# ---------------------------------------------------------------- under gRPC


class Reverse(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request[::-1])


@contextmanager
def grpc_link(settings: LinkSettings) -> Iterator[tuple[LinkThread, Callable[..., bytes]]]:
    """A link to a gRPC server, and a call through it."""
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Reverse()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with (
            LinkThread("127.0.0.1:0", f"127.0.0.1:{port}", settings) as link,
            calling(link) as call,
        ):
            yield link, call
    finally:
        server.stop(None).wait()


@contextmanager
def calling(link: LinkThread) -> Iterator[Callable[..., bytes]]:
    """A call over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(link.address, options) as channel:
        yield channel.unary_unary("/test/Reverse")


def test_a_call_through_a_link() -> None:
    request = os.urandom(1_000_000)
    with grpc_link(LinkSettings(rate_mbps=200, rtt_ms=20)) as (link, call):
        assert call(request, timeout=60, wait_for_ready=True) == request[::-1]
        assert len(request) < link.carried.up < 1.1 * len(request)
        assert len(request) < link.carried.down < 1.1 * len(request)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_call_goes_on_when_the_link_is_mended(direction: Direction) -> None:
    request = os.urandom(1_000_000)
    with grpc_link(FREE) as (link, call), futures.ThreadPoolExecutor(1) as thread:
        assert call(b"abc", timeout=60, wait_for_ready=True) == b"cba"
        link.cut_after(500_000, direction)
        answer = thread.submit(call, request, timeout=60)
        link.wait_until_cut(60)
        assert not answer.done() and link.is_cut
        link.mend()
        assert answer.result() == request[::-1]


def test_a_call_fails_when_the_link_resets_and_the_next_succeeds_when_it_is_mended() -> None:
    with grpc_link(FREE) as (link, call):
        link.cut_after(500_000, "up", "reset")
        with pytest.raises(grpc.RpcError) as failed:
            call(bytes(1_000_000), timeout=60, wait_for_ready=True)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        link.wait_until_cut(60)
        link.mend()
        # The first channel may not have noticed yet that its connection is no more.
        with calling(link) as again:
            assert again(b"abc", timeout=60, wait_for_ready=True) == b"cba"


def test_a_cut_that_does_not_come() -> None:
    with LinkThread("127.0.0.1:0", "127.0.0.1:1", FREE) as link:
        with pytest.raises(TimeoutError):
            link.wait_until_cut(0.01)
        assert link.carried == (0, 0) and not link.is_cut
