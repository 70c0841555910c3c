"""A link that is cut amid a transfer: both ends finish after the repair, nothing counts twice."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Literal

import pytest

import halos
from halos.core.messages import Push, Received, Reject, WorkerUpdate
from halos.errors import UserError
from halos.runtime import control, parent, server_process
from halos.runtime.dispatcher import Step
from halos.runtime.loop import LoopThread
from halos.runtime.server_process import ServerProcess
from halos.specification import RunSpecification
from halos.wire import rpc
from halos.wire.certificates import issue, make_authority
from halos.wire.frames import CHUNK_BYTES, Hello
from halos.wire.link import LinkSettings, LinkThread, split_address
from halos.wire.security import Security
from workers.worker import train

from .conftest import Spec
from .networks import Watch
from .whole import END_S, Whole, whole_run

Direction = Literal["up", "down"]
Mode = Literal["drop", "reset"]
Child = Callable[[], Future[bool]]  # starts it, and is to come to the end of its training
MODEL = {"layers": 4, "heads": 4, "width": 128}
WIDE = {"layers": 2, "heads": 4, "width": 384}
FAST = LinkSettings(rate_mbps=400, rtt_ms=1)
CUT_S = 120
CONTROL_BYTES = 150_000  # at most, of all that is no tensor
LOST_CHUNKS = 2  # at most, that had left one end and not come to be at the other
CUTS = pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
WAYS = pytest.mark.parametrize("direction", ["up", "down"])
MODES = pytest.mark.parametrize("mode", ["drop", "reset"])


class Applied:
    """How often each update was applied at a server."""

    def __init__(self, process: ServerProcess) -> None:
        self.times: Counter[str] = Counter()
        process.driver.observers.append(self)

    def __call__(self, step: Step) -> None:
        match step.event:
            case Received(sender, WorkerUpdate(lease=key) | Push(sequence=key)):
                if not any(isinstance(effect, Reject) for effect in step.effects):
                    self.times[f"{sender} {key}"] += 1


@contextmanager
def link_to(process: ServerProcess) -> Iterator[LinkThread]:
    with LinkThread("127.0.0.1:0", process.address, FAST) as link:
        yield link


def model_bytes(whole: Whole) -> int:
    return 4 * whole.coordinator.children.layout.numel


@contextmanager
def worker_over_link(settings: RunSpecification) -> Iterator[tuple[Whole, LinkThread, Child]]:
    """A run whose worker will reach the coordinator through a link."""
    with whole_run(settings) as whole, link_to(whole.coordinator) as link:

        def start() -> Future[bool]:
            return whole.threads.submit(joined, link.address)

        yield whole, link, start


@contextmanager
def region_over_link(settings: RunSpecification) -> Iterator[tuple[Whole, LinkThread, Child]]:
    """A run whose region, with one worker, will reach the coordinator through a link."""
    told, about = server_process.told_by(settings)
    plain, listen = Security.plain(), "127.0.0.1:0"
    with ExitStack() as stack:
        root = stack.enter_context(server_process.coordinator(told, about, listen, plain))
        link = stack.enter_context(link_to(root))
        whole = Whole(settings.run.directory, root)
        stack.callback(whole.threads.shutdown)
        whole.serving["root"] = whole.threads.submit(root.run)
        stack.callback(lambda: [p.driver.stop() for p in (root, *whole.regions.values())])

        def start() -> Future[bool]:
            folder = settings.run.directory / "servers" / "eu"
            region = stack.enter_context(
                server_process.region("eu", link.address, listen, plain, directory=folder)
            )
            whole.regions["eu"] = region
            whole.serving["eu"] = whole.threads.submit(region.run)
            return whole.train(train, "eu")

        yield whole, link, start


def joined(address: str) -> bool:
    with halos.join(address) as run:
        return train(run)


def check_end(whole: Whole, applied: Applied, samples: int) -> None:
    ledger = whole.coordinator.server.state.leasing.ledger
    assert ledger.all_credited and ledger.credited.total == samples
    assert applied.times and set(applied.times.values()) == {1}


def of_one_worker(specification: Spec, model: dict[str, int]) -> RunSpecification:
    return specification(
        model=model,
        regions=[],
        root={"workers": 1},
        sync={"preset": "paper", "local_steps": 2, "accumulation": 2},
        training={"local_steps_total": 8, "batch_size": 2},
    )


def of_one_region(specification: Spec) -> RunSpecification:
    return specification(
        model=MODEL,
        regions=[{"name": "eu", "workers": 1}],
        sync={"preset": "paper", "local_steps": 2, "accumulation": 2, "in_flight": "carry"},
        training={"local_steps_total": 12, "batch_size": 2},
    )


@CUTS
@WAYS
@MODES
def test_a_workers_exchange_is_cut(
    specification: Spec, share: float, direction: Direction, mode: Mode
) -> None:
    with worker_over_link(of_one_worker(specification, MODEL)) as (whole, link, start):
        applied, size = Applied(whole.coordinator), model_bytes(whole)
        link.cut_after(int(share * size), direction, mode)
        loop = start()
        link.wait_until_cut(CUT_S)
        before = link.carried
        link.mend()
        whole.end(loop)
        check_end(whole, applied, 16)
        assert getattr(link.carried, direction) > getattr(before, direction)


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_an_upload_goes_on_where_it_was_cut(specification: Spec, share: float) -> None:
    """By the bytes: of four updates, what was not carried before is carried after, and no more."""
    with worker_over_link(of_one_worker(specification, WIDE)) as (whole, link, start):
        applied, size = Applied(whole.coordinator), model_bytes(whole)
        lost = CONTROL_BYTES + LOST_CHUNKS * CHUNK_BYTES
        assert share * size > 2 * lost, "from the start again would be seen"
        link.cut_after(int(share * size), "up", "reset")
        loop = start()
        link.wait_until_cut(CUT_S)
        before = link.carried
        link.mend()
        whole.end(loop)
        check_end(whole, applied, 16)
        assert (4 - share) * size - lost < link.carried.up - before.up < (4 - share) * size + lost


@CUTS
@WAYS
@MODES
def test_a_regions_exchange_is_cut(
    specification: Spec, share: float, direction: Direction, mode: Mode
) -> None:
    with region_over_link(of_one_region(specification)) as (whole, link, start):
        applied, size = Applied(whole.coordinator), model_bytes(whole)
        link.cut_after(int(share * size), direction, mode)
        loop = start()
        link.wait_until_cut(CUT_S)
        link.mend()
        assert loop.result(timeout=END_S)
        whole.end()
        check_end(whole, applied, 24)


@WAYS
@pytest.mark.parametrize("who", ["worker", "region"])
def test_a_link_that_is_silent_is_found_out_at_both_ends(
    specification: Spec,
    direction: Direction,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No end closes a connection amid this; only that nobody answers is to be noticed."""
    monkeypatch.setattr(rpc, "KEEPALIVE_S", 2.0)
    watch = Watch()
    if who == "worker":
        opened, samples = worker_over_link(of_one_worker(specification, MODEL)), 16
    else:
        opened, samples = region_over_link(of_one_region(specification)), 24
    with opened as (whole, link, start):
        applied, size = Applied(whole.coordinator), model_bytes(whole)
        link.cut_after(size // 2, direction, "drop")
        loop = start()
        link.wait_until_cut(CUT_S)
        watch.until(lambda: not whole.coordinator.children.here(), "the server has noticed")
        watch.until(lambda: "lost the server" in caplog.text, "the child has noticed")
        link.mend()
        assert loop.result(timeout=END_S)
        whole.end()
        check_end(whole, applied, samples)


@pytest.mark.parametrize("secure", [False, True])
def test_an_address_that_accepts_and_never_answers_is_not_given_up(
    secure: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of a server that is held up, or behind a gateway: it is no mismatch, and may heal."""
    monkeypatch.setattr(rpc, "CONNECT_S", 0.2)
    monkeypatch.setattr(parent, "RETRY_S", (0.01,))
    monkeypatch.setattr(parent, "CLOSED_TRIES", 2)
    security = Security.plain()
    if secure:
        make_authority(tmp_path / "ca")
        issue(tmp_path / "ca", tmp_path / "worker", "worker", "w")
        security = Security.from_folder(tmp_path / "worker")
    loop, hello = LoopThread(), Hello("worker", "w")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        link = parent.ParentLink(loop, address, security, hello)
        greeting = loop.submit(link.greet())
        Watch().until(lambda: link._waiting._tries > 4 or greeting.done(), "it tries again")
        assert not greeting.done()
        greeting.cancel()
        link.stop()
    loop.close()
    assert "nobody answers" in caplog.text


@pytest.mark.parametrize(
    ("answer", "told"),
    [(b"", "was there before"), (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "is no halos server")],
)
def test_a_server_that_was_there_is_waited_for_whatever_answers_in_its_stead(
    answer: bytes,
    told: str,
    specification: Spec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a gateway does that lost the server behind it. Of an address never met it is an error."""
    monkeypatch.setattr(parent, "RETRY_S", (0.01,))
    monkeypatch.setattr(parent, "CLOSED_TRIES", 2)
    loop = LoopThread()
    with whole_run(of_one_worker(specification, MODEL)) as whole:
        with link_to(whole.coordinator) as link:
            address = link.address
            child = parent.ParentLink(loop, address, Security.plain(), Hello("worker", "w"))
            loop.run(child.greet())
            loop.run(child._reset())
        with answering(address, answer):
            greeting = loop.submit(child.greet())
            Watch().until(lambda: child._waiting._tries > 4 or greeting.done(), "it tries again")
            assert not greeting.done()
        with LinkThread(address, whole.coordinator.address, FAST):
            assert greeting.result(END_S).name == "root/w"
            child.stop()
    loop.close()
    assert told in caplog.text


@contextmanager
def answering(address: str, answer: bytes) -> Iterator[None]:
    """Whoever connects to ``address`` is sent ``answer`` and cut off."""
    host, port = split_address("address", address)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                with near:
                    near.sendall(answer)

    with socket.create_server((host, port)) as server:
        thread = Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_question_that_is_cut_off_is_asked_again(
    specification: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a connection that is closed every time tells that the server will not have us."""
    monkeypatch.setattr(control, "AGAIN_S", 0.01)
    loop = LoopThread()
    with (
        whole_run(of_one_worker(specification, MODEL)) as whole,
        link_to(whole.coordinator) as link,
    ):
        link.cut("reset")
        with pytest.raises(UserError, match="closed the connection at once"):
            control.status_of_server(link.address, Security.plain())
        monkeypatch.setattr(control, "CLOSED_TRIES", 1 << 20)
        asked = loop.submit(control.ask_status(link.address, Security.plain()))
        link.mend()
        assert asked.result(END_S)["run"] == "small"
    loop.close()
