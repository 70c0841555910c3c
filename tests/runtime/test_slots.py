"""Exchanges with children, many and broken: turns are kept, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import grpc.aio
import pytest
import torch

import halos
from halos.core.fragments import Fragments, ModelLayout, Parameter
from halos.core.messages import Heartbeat, Message, Received, WorkerUpdate
from halos.core.tensors import NOTHING
from halos.errors import UserError
from halos.runtime import children as children_module
from halos.runtime import parent
from halos.runtime.children import Child, Children, Unacceptable
from halos.runtime.dispatcher import Step
from halos.runtime.loop import LoopThread
from halos.runtime.parent import ParentLink
from halos.runtime.slots import Slots
from halos.wire.chunks import Staging, chunks, manifest_of
from halos.wire.frames import Begin, Channel, Chunk, Codecs, Header, Hello, Hold, Part, UploadFrame
from halos.wire.security import Security
from workers.worker import train

from .conftest import Spec
from .networks import END_S, Watch
from .test_exchange import Asker, Echo
from .whole import whole_run

ELEMENTS = 600_000  # 2.4 MB: three chunks
HOWS = ("begun", "cancelled", "damaged", "channel closed")
LAYOUT = ModelLayout((Parameter(("weight",), (ELEMENTS,), "float32"),))


def payload() -> Fragments:
    return Fragments([torch.ones(ELEMENTS)])


def update() -> WorkerUpdate:
    return WorkerUpdate("lease", 1, 0, 1, 1, 1.0, 1.0, 1.0, NOTHING)


def begin_of(child: str, tensors: Fragments) -> Begin:
    return Begin(Header("echo", 1, 1, child), update(), manifest_of(tensors, "fp32"))


# ---------------------------------------------------------------- turns


def test_who_asks_again_while_it_waits_has_one_place_and_one_slot() -> None:
    async def story() -> None:
        slots = Slots(1)
        await slots.acquire("a")
        earlier = asyncio.create_task(slots.acquire("b"))
        after = asyncio.create_task(slots.acquire("c"))
        await asyncio.sleep(0)
        again = asyncio.create_task(slots.acquire("b"))
        await asyncio.gather(earlier, return_exceptions=True)
        assert earlier.cancelled() and slots.waiting == 2
        slots.release("a")
        await again
        assert slots.held == 1 and not after.done()
        slots.release("b")
        await after
        assert (slots.held, slots.waiting) == (1, 0)

    asyncio.run(story())


def test_a_slot_that_comes_in_the_moment_of_giving_up_goes_on_to_the_next() -> None:
    async def story() -> None:
        slots = Slots(1)
        await slots.acquire("a")
        gives_up = asyncio.create_task(slots.acquire("b"))
        after = asyncio.create_task(slots.acquire("c"))
        await asyncio.sleep(0)
        slots.release("a")
        gives_up.cancel()
        await asyncio.gather(gives_up, return_exceptions=True)
        assert gives_up.cancelled()
        await after
        slots.release("c")
        slots.release("c")
        assert (slots.held, slots.waiting) == (0, 0)

    asyncio.run(story())


class OneByOne(Echo):
    """Notes whether somebody else's update was coming in when one had come."""

    def answer(self, child: str, channel: Channel, message: Message) -> None:
        if isinstance(message, WorkerUpdate):
            assert self.children.slots.held == 1
            assert not [c for c in self.children.here() if c.upload is not None]
        super().answer(child, channel, message)


def test_five_children_and_one_slot_take_turns() -> None:
    echo = OneByOne(LAYOUT, max_inflight=1)
    address = echo.start()
    askers = [Asker(address, "fp32", name=str(number)) for number in range(5)]
    try:
        for _ in range(2):
            for asker in askers:
                asker.arrived.clear()
                asker.send(payload())
            assert all(asker.arrived.wait(END_S) for asker in askers)
        assert sorted(echo.seen) == sorted(2 * [f"root/{number}" for number in range(5)])
    finally:
        for asker in askers:
            asker.stop()
        echo.stop()
    assert (echo.children.slots.held, echo.children.slots.waiting) == (0, 0)


# ---------------------------------------------------------------- what an end leaves behind


@pytest.fixture
def delivered() -> list[Message]:
    """What a server of :func:`alone` was handed."""
    return []


@pytest.fixture
def alone(delivered: list[Message]) -> Iterator[Callable[..., Any]]:
    """Run a coroutine on a server's children without its sockets."""
    loop = LoopThread()

    def deliver(_child: str, _: Channel, message: Message) -> None:
        delivered.append(message)

    def run(story: Callable[[Children], Any], limit: int = 1) -> Any:
        there = Children(loop, LAYOUT, deliver, Codecs(), max_inflight=limit)
        return loop.run(story(there))

    yield run
    loop.close()


def welcome(there: Children, name: str, instance: bytes = b"1") -> Child:
    there.expect(name, "worker", instance, 60.0)
    child = there.find(name, instance)
    child.connected = True
    return child


async def sent(there: Children, child: Child, tensors: Fragments, count: int) -> None:
    """The first chunks of an update."""
    begun = await there.begin(child, begin_of(child.name, tensors))

    async def frames() -> AsyncIterator[UploadFrame]:
        yield Part(begun.transfer, 0)
        pieces = chunks(tensors, manifest_of(tensors, "fp32"))
        for chunk in [next(pieces) for _ in range(count)]:
            yield chunk

    await there.upload(child, frames())


async def at_once(child: str, tensors: Fragments, count: int) -> AsyncIterator[UploadFrame]:
    """An update that is announced in its own stream, and its first chunks."""
    yield begin_of(child, tensors)
    for chunk in islice(chunks(tensors, manifest_of(tensors, "fp32")), count):
        yield chunk


def test_an_update_that_comes_at_once_counts_when_it_is_whole_and_goes_on_if_it_was_cut_off(
    alone: Callable[..., Any], delivered: list[Message]
) -> None:
    async def story(there: Children) -> None:
        child, tensors = welcome(there, "w"), payload()
        with pytest.raises(Unacceptable, match="not whole"):
            await there.upload(child, at_once("w", tensors, 2))
        assert delivered == []
        begun = await there.begin(child, begin_of("w", tensors))
        assert [p.elements for p in begun.received] == [2 * 262_144]
        await there.upload(child, at_once("w", tensors, 3))
        (came,) = delivered
        assert isinstance(came, WorkerUpdate) and isinstance(came.payload, Fragments)
        assert torch.equal(came.payload.tensors[0], tensors.tensors[0])

    alone(story)


def test_a_stream_says_once_of_what_it_is(
    alone: Callable[..., Any], delivered: list[Message]
) -> None:
    async def story(there: Children) -> None:
        child, tensors = welcome(there, "w"), payload()

        async def twice() -> AsyncIterator[UploadFrame]:
            async for frame in at_once("w", tensors, 3):
                yield frame
            yield begin_of("w", payload())

        with pytest.raises(Unacceptable, match="once"):
            await there.upload(child, twice())
        assert delivered == []

    alone(story)


@pytest.mark.parametrize(
    ("header", "refusal"),
    [
        (Header("another", 1, 1, "0"), "the run's specification is another"),
        (Header("echo", 1, 2, "0"), "the run's specification is another"),
        (Header("echo", 1, 1, "1"), "cannot send an update of .*1"),
    ],
)
def test_what_is_not_of_this_run_or_this_child_is_refused_however_it_comes(
    header: Header, refusal: str
) -> None:
    echo = Echo(LAYOUT)
    address, loop, tensors = echo.start(), LoopThread(), payload()
    foreign = replace(begin_of("", tensors), header=header)

    async def story() -> None:
        child = Breaking(loop, address, "0")
        name = (await child.link.greet()).name
        theirs = replace(foreign, header=replace(header, sender=f"{name[:-1]}{header.sender}"))

        async def frames() -> AsyncIterator[UploadFrame]:
            yield theirs

        for method, request in (("Begin", theirs), ("Upload", frames())):
            with pytest.raises(grpc.aio.AioRpcError, match=refusal):
                await child._call(method, request)
        await child.link._reset()

    try:
        loop.run(story())
        assert echo.seen == []
    finally:
        loop.close()
        echo.stop()


def test_what_was_sent_outlives_the_connection_of_a_child_long_here_and_then_is_forgotten(
    alone: Callable[..., Any],
) -> None:
    async def story(there: Children) -> None:
        child = welcome(there, "w")
        child.expires -= 3600  # it said hello an hour ago
        tensors = payload()
        await sent(there, child, tensors, 2)
        there.hang_up("w")
        there._sweep_once(child.left + 60)
        there.expect("w", "worker", b"1", 60.0)
        child.connected = True
        begun = await there.begin(there.find("w", b"1"), begin_of("w", tensors))
        assert [p.elements for p in begun.received] == [2 * 262_144]
        there.hang_up("w")
        there._sweep_once(child.left + children_module.KEPT_S + 1)
        assert not there._known and there.slots.held == 0

    alone(story)


def test_of_updates_that_were_cut_off_only_the_newest_few_are_kept(
    alone: Callable[..., Any],
) -> None:
    async def story(there: Children) -> None:
        for number in range(20):
            await sent(there, welcome(there, f"w{number}"), payload(), 1)
            there.hang_up(f"w{number}")
        kept = [c.name for c in there._known.values() if c.upload is not None]
        assert kept == ["w17", "w18", "w19"]  # one that was coming in, and a slot's each

    alone(story, limit=2)


def test_a_call_that_waited_for_a_process_that_is_gone_keeps_no_slot(
    alone: Callable[..., Any],
) -> None:
    async def story(there: Children) -> None:
        busy = welcome(there, "busy")
        await there.begin(busy, begin_of("busy", payload()))
        former = welcome(there, "w", b"former")
        waiting = asyncio.create_task(there.begin(former, begin_of("w", payload())))
        await asyncio.sleep(0)
        welcome(there, "w", b"new")
        there.hang_up("busy")
        with pytest.raises(Unacceptable, match="another process"):
            await waiting
        assert there.slots.held == 0

    alone(story)


def test_a_call_that_waited_for_a_child_that_left_keeps_its_slot_for_a_while_only(
    alone: Callable[..., Any],
) -> None:
    async def story(there: Children) -> None:
        await there.begin(welcome(there, "busy"), begin_of("busy", payload()))
        child = welcome(there, "w")
        waiting = asyncio.create_task(there.begin(child, begin_of("w", payload())))
        await asyncio.sleep(0)
        there.hang_up("w")
        there.hang_up("busy")
        await waiting
        assert there.slots.held == 1
        assert child.moves_until is not None
        there._sweep_once(child.moves_until)
        assert there.slots.held == 0

    alone(story)


class Breaking:
    """A child that begins exchanges and breaks them off."""

    def __init__(self, loop: LoopThread, address: str, name: str) -> None:
        self.link = ParentLink(loop, address, Security.plain(), Hello("worker", name))
        self.bulk = self.link.stub(bulk=True)

    async def upload(self, tensors: Fragments, how: str) -> None:
        name = (await self.link.greet()).name
        talk = self.link.stub().open("Talk", metadata=self.link.metadata())
        await talk.write(Hold(name, self.link.hello.instance))
        begun = await self._call("Begin", begin_of(name, tensors))
        if how != "begun":
            await self._break_upload(begun, tensors, how)
        if how != "channel closed":
            talk.cancel()
        await self.link._reset()

    async def _break_upload(self, begun: Any, tensors: Fragments, how: str) -> None:
        pieces = chunks(tensors, manifest_of(tensors, "fp32"))
        arrived, broken = asyncio.Event(), asyncio.Event()

        async def frames() -> AsyncIterator[UploadFrame]:
            yield Part(begun.transfer, 0)
            yield next(pieces)
            arrived.set()  # gRPC asks for the next once it has taken this one
            if how == "damaged":
                yield Chunk(0, 0, 1, 0, b"0000")
            await broken.wait()

        call = asyncio.ensure_future(self._call("Upload", frames()))
        if how == "damaged":
            with pytest.raises(grpc.aio.AioRpcError, match="do not begin and end"):
                await call
        else:
            await arrived.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        broken.set()

    def _call(self, name: str, request: Any) -> Any:
        return self.bulk.call(name, request, metadata=self.link.metadata(), timeout=END_S)


@pytest.mark.parametrize(
    ("error", "heard"), [(grpc.aio.InternalError("gone"), False), (ValueError("a mistake"), True)]
)
def test_only_that_a_peer_was_gone_before_it_was_answered_is_not_reported(
    error: Exception, heard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = LoopThread()

    async def answer() -> None:
        raise error

    async def story() -> None:
        await asyncio.wait([asyncio.ensure_future(answer())])

    loop.run(story())
    loop.close()
    assert bool(caplog.records) is heard


def tasks_of(loop: LoopThread) -> set[str]:
    async def names() -> set[str]:
        here = asyncio.current_task()
        return {t.get_coro().__qualname__ for t in asyncio.all_tasks() if t is not here}  # type: ignore[union-attr]

    return loop.run(names())


@pytest.fixture
def stagings() -> Iterator[Callable[[], int]]:
    """How many there are of this test's, nothing being done about cycles: one that only the
    collector would find is memory that grows with the number of failures."""
    gc.collect()
    earlier = weakref.WeakSet(thing for thing in gc.get_objects() if type(thing) is Staging)
    gc.disable()
    yield lambda: sum(type(thing) is Staging and thing not in earlier for thing in gc.get_objects())
    gc.enable()


async def swept(there: Children) -> tuple[int, int, int]:
    there._sweep_once(10.0**9)
    return len(there._known), there.slots.held, there.slots.waiting


@pytest.mark.parametrize("how", HOWS)
def test_an_update_that_was_broken_off_is_gone_without_a_search_for_cycles(
    how: str, stagings: Callable[[], int]
) -> None:
    echo = Echo(LAYOUT)
    address, loop, watch = echo.start(), LoopThread(), Watch()

    async def break_off() -> None:
        for _ in range(3):
            await Breaking(loop, address, "0").upload(payload(), how)

    try:
        loop.run(break_off())
        watch.until(lambda: stagings() == 1, "the newest is kept")
        watch.until(lambda: echo.loop.run(swept(echo.children)) == (0, 0, 0), "all was given up")
        watch.until(lambda: stagings() == 0, "no update is kept")
    finally:
        loop.close()
        echo.stop()


def test_a_stream_that_stands_still_keeps_nothing_of_an_update_that_was_given_up(
    alone: Callable[..., Any], stagings: Callable[[], int]
) -> None:
    async def story(there: Children) -> None:
        child, tensors = welcome(there, "w"), payload()
        begun = await there.begin(child, begin_of("w", tensors))
        arrived = asyncio.Event()

        async def frames() -> AsyncIterator[UploadFrame]:
            yield Part(begun.transfer, 0)
            yield next(chunks(tensors, manifest_of(tensors, "fp32")))
            arrived.set()
            await asyncio.Event().wait()

        coming = asyncio.create_task(there.upload(child, frames()))
        await arrived.wait()
        assert stagings() == 1
        welcome(there, "w", b"new")
        assert stagings() == 0 and not coming.done()
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)

    alone(story)


@pytest.mark.slow
def test_two_hundred_updates_broken_off_leave_nothing_behind(stagings: Callable[[], int]) -> None:
    echo = Echo(LAYOUT, max_inflight=2)
    address, loop = echo.start(), LoopThread()
    before, watch = tasks_of(echo.loop), Watch()

    async def break_off() -> None:
        for number in range(200):
            child = Breaking(loop, address, str(number % 5))
            await child.upload(payload(), HOWS[number % 4])

    try:
        loop.run(break_off())
        watch.until(lambda: not echo.children.here(), "the server has noticed")
        watch.until(lambda: stagings() <= 5, "a child's newest update is kept at most")
        watch.until(lambda: echo.loop.run(swept(echo.children)) == (0, 0, 0), "all was given up")
        watch.until(lambda: stagings() == 0, "no update is kept")
        watch.until(lambda: tasks_of(echo.loop) <= before, "no call is left over")
        asker = Asker(address, "fp32")
        asker.send(payload())
        assert asker.arrived.wait(END_S)
        asker.stop()
    finally:
        loop.close()
        echo.stop()


def test_of_two_processes_with_one_name_the_second_is_told_and_the_run_goes_on(
    specification: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "RETRY_S", (0.01,))
    told: list[str] = []

    def with_a_double(run: halos.Run) -> Any:
        with pytest.raises(UserError) as error, halos.join(whole.address("root"), name="0"):
            pass
        told.append(str(error.value))
        return train(run)

    settings = specification(
        regions=[],
        root={"workers": 1},
        training={"local_steps_total": 8, "batch_size": 2},
    )
    with whole_run(settings) as whole:
        whole.end(whole.train(with_a_double, "root", name="0"))
        ledger = whole.coordinator.server.state.leasing.ledger
        assert ledger.all_credited and ledger.credited.total == 16
        assert not whole.coordinator.driver.refusals
        (sentence,) = told
        assert sentence == (
            f"{whole.address('root')}: root/0 is here already as another process; "
            "stop that one, or take another name"
        )


# ---------------------------------------------------------------- two lanes


def test_a_server_amid_a_long_merge_answers_heartbeats(specification: Spec) -> None:
    settings = specification(
        regions=[],
        root={"workers": 1},
        membership={"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 60.0},
        training={"local_steps_total": 8, "batch_size": 2},
    )
    watch, over = Watch(), threading.Event()
    merging, beats = threading.Event(), []

    def merge_for_long(step: Step) -> None:
        match step.event:
            case Received(_, WorkerUpdate()) if not merging.is_set():
                merging.set()
                assert over.wait(END_S)
            case Received(_, Heartbeat()) if merging.is_set() and not over.is_set():
                beats.append(step.effects)
        watch.changed()

    with whole_run(settings) as whole:
        whole.coordinator.driver.observers.append(merge_for_long)
        loop = whole.train(train, "root")
        watch.until(lambda: len(beats) >= 5, "heartbeats come in amid a merge")
        over.set()
        whole.end(loop)
        assert all(beats), "each was answered"
        assert not whole.coordinator.driver.refusals
