"""An exchange of a whole model over loopback, as production does it, beside plainer ways.

Two processes: a server with :class:`Children` and :class:`Serving`, and a child with
:class:`ParentLink`. The child pushes a change, the server answers with a model of the same size.
Beside it the same bytes over raw TCP, and as protobuf messages over gRPC as it is by default.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import grpc
import torch

from halos.codec.codecs import CODECS
from halos.core.fragments import Fragments, ModelLayout, Parameter
from halos.core.messages import Message, Push, PushAnswer
from halos.core.samples import Report
from halos.core.topology import ROOT, ServerPlace, Topology
from halos.runtime.children import Children
from halos.runtime.loop import LoopThread
from halos.runtime.parent import ParentLink
from halos.runtime.serving import Answers, Serving
from halos.wire.chunks import layout_shape
from halos.wire.frames import (
    NEWEST_PROTOCOL,
    Channel,
    CodecName,
    Codecs,
    DatasetShape,
    Greeting,
    Hello,
)
from halos.wire.link import LinkSettings, LinkThread
from halos.wire.security import Security
from halos.wire.serde import METHODS

PATIENCE_S = 300.0
BLOCK = 1 << 20
BLOB = METHODS["Constants"]  # whose reply is one message with a field of bytes
RUN, CHILD = "bench", "region"
REPORT = Report(1, 1, 1, 1.0)


@dataclass(frozen=True)
class Way:
    """How the exchange is made: raw TCP, a plain stream of protobuf messages, or as production.

    ``certs``: folders ``coordinator`` and ``server``, as ``halos certs issue`` makes them.
    """

    name: str
    kind: Literal["tcp", "protobuf", "halos"] = "halos"
    codec: CodecName = "fp32"
    certs: Path | None = None

    @property
    def codecs(self) -> Codecs:
        """The same both ways."""
        return Codecs(up=self.codec, models=self.codec)

    def bytes_of(self, parameters: int) -> int:
        """What goes over the network one way, at most."""
        return CODECS[self.codec].size(parameters)

    def security(self, role: str) -> Security:
        return Security.from_folder(self.certs / role) if self.certs else Security.plain()


def layout_of_size(parameters: int) -> ModelLayout:
    return ModelLayout((Parameter(("weight",), (parameters,), "float32"),))


def payload_of(layout: ModelLayout) -> Fragments:
    """Numbers as an update has them, so that nothing on the way has an easy time."""
    torch.manual_seed(0)
    return Fragments([torch.randn(end - start) * 1e-3 for start, end in layout.fragments])


def greeting_of(
    layout: ModelLayout, specification: str = "{}", datasets: tuple[DatasetShape, ...] = ()
) -> Greeting:
    return Greeting(
        protocol=NEWEST_PROTOCOL,
        features=(),
        run=RUN,
        specification_version=1,
        specification=specification,
        layout=layout_shape(layout),
        datasets=datasets,
        server=ROOT,
        name="",
    )


@contextmanager
def exchange(
    way: Way, parameters: int, link: LinkSettings | None = None
) -> Iterator[Callable[[], float]]:
    """A function that makes one exchange, there and back, and returns its seconds.

    ``link``: of an emulated network in between.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    serve, child = {
        "tcp": (_serve_tcp, _tcp_child),
        "protobuf": (_serve_protobuf, _protobuf_child),
        "halos": (_serve, _child),
    }[way.kind]
    server = context.Process(target=serve, args=(theirs, way, parameters), daemon=True)
    server.start()
    try:
        if not ours.poll(PATIENCE_S):
            raise TimeoutError("the server of the benchmark did not start")
        with _reached(ours.recv(), link) as address, child(way, address, parameters) as once:
            yield once
    finally:
        ours.close()  # the server ends
        server.join(10)
        server.kill()


@contextmanager
def _reached(address: str, link: LinkSettings | None) -> Iterator[str]:
    if link is None:
        yield address
        return
    with LinkThread("127.0.0.1:0", address, link) as between:
        yield between.address


@contextmanager
def _child(way: Way, address: str, parameters: int) -> Iterator[Callable[[], float]]:
    loop, payload = LoopThread(), payload_of(layout_of_size(parameters))
    link = ParentLink(loop, address, way.security("server"), Hello("server", CHILD))
    arrived = threading.Event()
    failures: list[BaseException] = []

    def deliver(_: Channel, message: Message) -> None:
        if isinstance(message, PushAnswer):
            arrived.set()

    def once() -> float:
        arrived.clear()
        began = time.perf_counter()
        link.send(Channel.NODE, Push(1, 1, 0, REPORT, Fragments(payload.tensors)))
        if not arrived.wait(PATIENCE_S):
            raise TimeoutError(f"{way.name}: no answer; {failures}")
        return time.perf_counter() - began

    try:
        loop.run(link.greet())
        link.start(way.codecs, deliver, lambda: None, failures.append)
        while not link.connected:
            time.sleep(0.01)
        yield once
    finally:
        link.stop()
        loop.close()


def _serve(pipe: Connection, way: Way, parameters: int) -> None:
    """Answers each update with a model, until the pipe is closed."""
    loop, layout = LoopThread(), layout_of_size(parameters)
    model = payload_of(layout)

    def deliver(child: str, _: Channel, message: Message) -> None:
        if isinstance(message, Push):
            children.send(child, Channel.NODE, PushAnswer(message.sequence, 1, 1, model, None))

    children = Children(loop, layout, deliver, way.codecs)
    greeting = greeting_of(layout)
    topology = Topology((ServerPlace(ROOT, None), ServerPlace(CHILD, ROOT)), ())
    answers = Answers(greeting, topology, b"", dict)
    serving = Serving(children, way.security("coordinator"), answers)
    pipe.send(loop.run(serving.start("127.0.0.1:0")))
    _until_closed(pipe)
    loop.run(serving.stop())
    loop.close()


@contextmanager
def _protobuf_child(_way: Way, address: str, parameters: int) -> Iterator[Callable[[], float]]:
    data = bytes(BLOCK)
    with grpc.insecure_channel(address) as channel:
        exchange = channel.stream_stream("/bench/Exchange", BLOB.encode_reply, BLOB.decode_reply)

        def once() -> float:
            began = time.perf_counter()
            for _ in exchange(data[:size] for size in _blocks(4 * parameters)):
                pass
            return time.perf_counter() - began

        yield once


def _serve_protobuf(pipe: Connection, _way: Way, parameters: int) -> None:
    data = bytes(BLOCK)

    def answer(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for _request in requests:
            pass
        yield from (data[:size] for size in _blocks(4 * parameters))

    handler = grpc.stream_stream_rpc_method_handler(answer, BLOB.decode_reply, BLOB.encode_reply)
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench", {"Exchange": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        pipe.send(f"127.0.0.1:{port}")
        _until_closed(pipe)
        server.stop(None).wait()


@contextmanager
def _tcp_child(_way: Way, address: str, parameters: int) -> Iterator[Callable[[], float]]:
    host, _, port = address.rpartition(":")
    size, data = 4 * parameters, bytes(BLOCK)
    into = memoryview(bytearray(BLOCK))
    with socket.create_connection((host, int(port))) as connection:

        def once() -> float:
            began = time.perf_counter()
            _send(connection, size, data)
            _receive(connection, size, into)
            return time.perf_counter() - began

        yield once


def _serve_tcp(pipe: Connection, _way: Way, parameters: int) -> None:
    size, data, into = 4 * parameters, bytes(BLOCK), memoryview(bytearray(BLOCK))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(f"127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            while _receive(connection, size, into):
                _send(connection, size, data)


def _send(connection: socket.socket, size: int, data: bytes) -> None:
    for block in _blocks(size):
        connection.sendall(data[:block])


def _blocks(size: int) -> Iterator[int]:
    for start in range(0, size, BLOCK):
        yield min(BLOCK, size - start)


def _receive(connection: socket.socket, size: int, into: memoryview) -> bool:
    """Whether all of it came; ``False`` at the end of the connection."""
    left = size
    while left:
        if not (count := connection.recv_into(into, min(BLOCK, left))):
            return False
        left -= count
    return True


def _until_closed(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return
