"""Who does not belong: one sentence at both ends, exit code 2, and the run is none the worse."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from torch import nn

import halos
from halos.errors import ExitCode, UserError
from halos.runtime import server_process
from halos.runtime.control import dial
from halos.runtime.handshakes import CALLS_WITHIN_S, QUIET_S, Handshakes
from halos.runtime.server_process import ServerProcess
from halos.specification import RunSpecification, load_specification
from halos.wire.certificates import issue, make_authority
from halos.wire.frames import Hello
from halos.wire.roles import Role
from halos.wire.security import Security
from halos.wire.serde import METHODS
from workers.worker import train

from .conftest import command

PATIENCE_S = 200
pytestmark = pytest.mark.timeout(280)


@dataclass
class Run:
    """A coordinator with certificates, and the folders of those who belong and who do not."""

    root: ServerProcess
    certs: Path

    def folder(self, role: Role, authority: str = "authority", name: str = "") -> Path:
        folder = self.certs / f"{authority}-{role}{name}"
        if not folder.exists():
            issue(self.certs / authority, folder, role, name or role)
        return folder


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "train.bin").write_bytes(bytes(range(200)) * 40)
    (folder / "validation.bin").write_bytes(bytes(range(200)) * 4)
    from .conftest import SMALL

    (folder / "run.toml").write_text(SMALL + "\n[root]\nworkers = 1\n")
    for authority in ("authority", "other"):
        make_authority(folder / authority)
    told, about = server_process.told_by(load_specification(folder / "run.toml"))
    run = Run(None, folder)  # type: ignore[arg-type]
    security = Security.from_folder(run.folder("coordinator"))
    with server_process.coordinator(told, about, "127.0.0.1:0", security) as run.root:
        yield run


def refused(run: Run, **options: object) -> str:
    with pytest.raises(UserError) as found:
        halos.join(run.root.address, **options).close()  # type: ignore[arg-type]
    return str(found.value)


def test_a_wrong_token(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = small_run.folder("worker")
    monkeypatch.setenv("HALOS_TOKEN", "x" * 40)
    with caplog.at_level(logging.WARNING):
        assert "does not know the join token in HALOS_TOKEN" in refused(small_run, certs=worker)
    assert "the call does not carry this run's join token" in caplog.text
    assert "x" * 40 not in caplog.text


@contextmanager
def heard(*words: str) -> Iterator[None]:
    """Leave once a line of the log has these words: what a server notices after a while."""
    come = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if all(word in record.getMessage() for word in words):
                come.set()

    listener, logger = Listener(), logging.getLogger("halos")
    logger.addHandler(listener)
    try:
        yield
        assert come.wait(PATIENCE_S), f"nothing was logged of {words}"
    finally:
        logger.removeHandler(listener)


def test_a_certificate_of_another_authority(small_run: Run) -> None:
    with heard("refused", "before a call", "another authority"):
        sentence = refused(small_run, certs=small_run.folder("worker", "other"))
    assert "was issued by another authority than ours" in sentence


def test_plain_text_to_a_port_that_wants_tls(small_run: Run) -> None:
    assert "it wants TLS, or is no halos server" in refused(small_run)


def test_only_those_who_do_not_call_are_told_of_and_only_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handshakes = Handshakes()
    late = time.monotonic() + CALLS_WITHIN_S
    for peer in ("ipv4:10.0.0.1:50001", "ipv4:10.0.0.1:50002"):
        handshakes.begun()
        handshakes.called(peer)
        handshakes.called(peer)
    handshakes.look(late)
    assert not caplog.messages
    handshakes.begun()
    handshakes.look(late + 1)
    assert [m for m in caplog.messages if m.startswith("refused a connection before a call")]
    for _ in range(3):
        handshakes.begun()
        handshakes.look(late + 2)
    assert len(caplog.messages) == 1
    handshakes.look(late + 2 + QUIET_S)
    assert "refused 3 connections before a call" in caplog.messages[1]


def test_a_workers_certificate_for_a_server(small_run: Run) -> None:
    with pytest.raises(UserError, match="does not serve"):
        region(small_run, "us", small_run.folder("worker"))


def region(run: Run, name: str, certs: Path) -> None:
    from halos.wire.security import check_listen

    security = Security.from_folder(certs)
    check_listen("127.0.0.1:0", security, False)
    with server_process.region(
        name, run.root.address, "127.0.0.1:0", security, directory=run.certs / "none"
    ):
        raise AssertionError("it was let in")


def test_a_region_that_the_run_does_not_have(
    small_run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UserError, match="is no region below root; give --region one of us, eu"),
    ):
        region(small_run, "mars", small_run.folder("server"))
    assert "'mars' is no region below root" in caplog.text


def test_another_runs_worker(small_run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """As when an address comes to belong to another run while a worker is away."""
    from halos.runtime.loop import LoopThread
    from halos.runtime.parent import ParentLink

    loop, security = LoopThread(), Security.from_folder(small_run.folder("worker"))
    link = ParentLink(loop, small_run.root.address, security, Hello("worker", run="another"))
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="not of 'another'"):
        loop.run(link.greet())
    assert "this is a server of run 'small', not of 'another'" in caplog.text
    link.stop()
    loop.close()


def test_another_models_worker_is_told_the_parameter(small_run: Run) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, 3)

    with heard("refused root/", "the model's parameters differ"):
        sentence = refused(small_run, certs=small_run.folder("worker"), model=Other())
    assert sentence.startswith("model: is not that of run 'small': parameter embedding.weight")


def test_a_refused_command_is_one_line_and_exit_code_2(small_run: Run) -> None:
    arguments = ["worker", "--join", small_run.root.address]
    certs = ["--certs", str(small_run.folder("worker", "other"))]
    done = subprocess.run(
        command(*arguments, *certs), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == ExitCode.USER
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1 and "another authority" in ours[0]
    assert "Traceback" not in done.stderr


def test_tls_to_a_port_that_speaks_plain_text(small_run: Run, tmp_path: Path) -> None:
    settings = load_specification(small_run.certs / "run.toml").model_dump(by_alias=True)
    settings["run"] = {"name": "plain", "directory": tmp_path / "plain"}
    told, about = server_process.told_by(RunSpecification.model_validate(settings))
    plain = Security.plain()
    with (
        server_process.coordinator(told, about, "127.0.0.1:0", plain) as root,
        pytest.raises(UserError, match="the server speaks plain text where we speak TLS"),
    ):
        halos.join(root.address, certs=small_run.folder("worker")).close()


def call(run: Run, method: str, message: bytes) -> str:
    """What a worker is told that sends ``message`` as it is."""

    async def send() -> str:
        async with dial(run.root.address, security) as channel:
            path = f"/{METHODS[method].service}/{method}"
            try:
                await channel.unary_unary(path)(message, metadata=security.metadata())
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
        raise AssertionError("it was answered")

    security = Security.from_folder(run.folder("worker"))
    return asyncio.run(send())


def test_a_message_that_is_none_is_one_line_and_a_status(
    small_run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert call(small_run, "Hello", bytes(range(256))).startswith("INVALID_ARGUMENT: ")
    assert len(caplog.records) == 1 and caplog.messages[0].startswith("refused ipv4:127.0.0.1")
    assert caplog.records[0].exc_info is None


def test_a_protocol_of_the_future(small_run: Run, caplog: pytest.LogCaptureFixture) -> None:
    hello = Hello("worker", instance=b"x" * 16, oldest_protocol=98, newest_protocol=99)
    with caplog.at_level(logging.WARNING):
        answer = call(small_run, "Hello", METHODS["Hello"].encode_request(hello))
    assert answer.startswith("INVALID_ARGUMENT: it speaks wire protocols 98 to 99")
    assert len(caplog.records) == 1 and "bring the older up to date" in caplog.messages[0]


def test_other_token_files_and_none(small_run: Run, tmp_path: Path) -> None:
    certs = small_run.folder("worker")
    assert "has no file train.bin" in refused(small_run, certs=certs, data=tmp_path)
    (tmp_path / "train.bin").write_bytes(bytes(range(199)) * 40)
    (tmp_path / "validation.bin").write_bytes(bytes(range(199)) * 4)
    with heard("refused root/", "data set", "is not the run's"):
        sentence = refused(small_run, certs=certs, data=tmp_path)
    assert "the token files here are not those of run 'small'" in sentence


def test_zz_the_run_itself_came_to_no_harm(small_run: Run) -> None:
    """Runs last: all of the above knocked at this coordinator."""
    with halos.join(small_run.root.address, certs=small_run.folder("worker")) as run:
        assert train(run)
    assert small_run.root.server.state.leasing.ledger.all_credited
