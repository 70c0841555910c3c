"""Whole models over the production path, there and back: bit for bit, whatever their size."""

from __future__ import annotations

import asyncio
import threading
import zlib
from dataclasses import dataclass, field

import pytest
import torch

from halos.core.fragments import Fragments, ModelLayout, Parameter
from halos.core.messages import Assignment, Message, WorkerUpdate
from halos.core.samples import Lease
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.runtime.children import Children
from halos.runtime.loop import LoopThread
from halos.runtime.parent import ParentLink
from halos.runtime.serving import Answers, Serving
from halos.runtime.slots import Slots
from halos.wire.chunks import layout_shape
from halos.wire.frames import NEWEST_PROTOCOL, Channel, CodecName, Codecs, Greeting, Hello
from halos.wire.security import Security

END_S = 280.0


@dataclass
class Echo:
    """A server that answers a worker's update with the very tensors of it, as a model."""

    layout: ModelLayout
    codec: CodecName = "fp32"
    max_inflight: int = 2
    loop: LoopThread = field(default_factory=LoopThread)
    seen: list[str] = field(default_factory=list)

    def start(self) -> str:
        codecs = Codecs(workers=self.codec)
        self.children = Children(
            self.loop, self.layout, self.answer, codecs, max_inflight=self.max_inflight
        )
        greeting = Greeting(
            protocol=NEWEST_PROTOCOL,
            features=(),
            run="echo",
            specification_version=1,
            specification="{}",
            layout=layout_shape(self.layout),
            datasets=(),
            server=ROOT,
            name="",
        )
        topology = Topology((ServerPlace(ROOT, None),), (WorkerPlace(f"{ROOT}/0", ROOT),))
        answers = Answers(greeting, topology, b"", dict)
        self.serving = Serving(self.children, Security.plain(), answers)
        return self.loop.run(self.serving.start("127.0.0.1:0"))

    def answer(self, child: str, _: Channel, message: Message) -> None:
        if isinstance(message, WorkerUpdate):
            self.seen.append(child)
            lease = Lease("next", "data", 0, ((0, 1),), 0)
            answer = Assignment(1, 1, message.lease, lease, 1, 1, 1, message.payload)
            self.children.send(child, Channel.NODE, answer)

    def stop(self) -> None:
        self.loop.run(self.serving.stop())
        self.loop.close()


class Asker:
    """A child that sends updates and waits for what comes back."""

    def __init__(self, address: str, codec: CodecName, name: str = "0") -> None:
        self.loop = LoopThread()
        self.arrived = threading.Event()
        self.came: Fragments | None = None
        self.link = ParentLink(self.loop, address, Security.plain(), Hello("worker", name))
        self.loop.run(self.link.greet())
        self.link.start(Codecs(workers=codec), self.deliver, lambda: None, lambda error: None)

    def deliver(self, _: Channel, message: Message) -> None:
        if isinstance(message, Assignment):
            assert isinstance(message.payload, Fragments)
            self.came = message.payload
            self.arrived.set()

    def send(self, payload: Fragments) -> None:
        update = WorkerUpdate("lease", 1, 0, 1, 1, 1.0, 1.0, 1.0, payload)
        # Until it is connected a message is lost, as a node would say it again.
        while not self.link.connected:
            pass
        self.link.send(Channel.NODE, update)

    def stop(self) -> None:
        self.link.stop()
        self.loop.close()


def checksum(payload: Fragments) -> int:
    value = 0
    for tensor in payload.tensors:
        value = zlib.crc32(memoryview(tensor.numpy()).cast("B"), value)
    return value


def there_and_back(elements: int, codec: CodecName = "fp32") -> None:
    layout = ModelLayout((Parameter(("weight",), (elements,), "float32"),))
    sent = Fragments([torch.randn(end - start) for start, end in layout.fragments])
    if codec == "bf16":
        sent = Fragments([t.bfloat16().float() for t in sent.tensors])
    echo = Echo(layout, codec)
    asker = Asker(echo.start(), codec)
    try:
        asker.send(sent)
        assert asker.arrived.wait(END_S)
        assert asker.came is not None and checksum(asker.came) == checksum(sent)
        traffic = asker.link.traffic
        size = elements * (4 if codec == "fp32" else 2)
        assert traffic.sent == traffic.received == size
    finally:
        asker.stop()
        echo.stop()


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("elements", [1, 4097, 3_000_000, 13_000_001])
def test_a_model_arrives_as_it_was_sent(elements: int, codec: CodecName) -> None:
    """Up to 52 MB in one tensor, far above gRPC's 4 MB, in fragments of which the last is odd."""
    there_and_back(elements, codec)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_above_two_gigabytes_arrives_as_it_was_sent() -> None:
    there_and_back(560_000_000)


def test_children_take_turns_and_none_is_forgotten() -> None:
    layout = ModelLayout((Parameter(("weight",), (300_000,), "float32"),))
    echo = Echo(layout, max_inflight=1)
    address = echo.start()
    askers = [Asker(address, "fp32", name=str(number)) for number in range(5)]
    try:
        for asker in askers:
            asker.send(Fragments([torch.zeros(300_000)]))
        assert all(asker.arrived.wait(END_S) for asker in askers)
        assert sorted(echo.seen) == [f"root/{number}" for number in range(5)]
    finally:
        for asker in askers:
            asker.stop()
        echo.stop()


def test_a_slot_goes_to_who_waits_longest_and_not_to_who_gave_up() -> None:
    async def story() -> list[str]:
        slots, order = Slots(1), []
        await slots.acquire("a")
        await slots.acquire("a")  # who has one has it

        async def turn(name: str) -> None:
            await slots.acquire(name)
            order.append(name)

        waiting = {name: asyncio.create_task(turn(name)) for name in "bcd"}
        await asyncio.sleep(0)
        assert slots.waiting == 3
        waiting["b"].cancel()
        await asyncio.gather(waiting["b"], return_exceptions=True)
        slots.release("a")
        slots.release("a")  # nothing: it holds none any more
        await waiting["c"]
        assert not waiting["d"].done()
        slots.release("c")
        await waiting["d"]
        slots.release("d")
        await slots.acquire("e")
        assert slots.waiting == 0
        return order

    assert asyncio.run(story()) == ["c", "d"]
