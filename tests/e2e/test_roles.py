"""Each role as a process: in any order, stopped and started again, and in a place that is taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from halos.errors import ExitCode
from halos.runtime.control import announced, status_of_server
from halos.wire.security import Security

from .conftest import SMALL, command, wait_for

PATIENCE_S = 200
pytestmark = pytest.mark.timeout(3 * PATIENCE_S)
ONE_REGION = (
    SMALL.partition("[[regions]]")[0]
    + """
[checkpoint]
every_s = 1

[evaluation]
every_s = 0.5
batches = 1

[[regions]]
name = "us"
workers = 1
"""
)
STEPS, MANY = "local_steps_total = 60", "local_steps_total = 1000000"


class Role:
    """A ``halos`` command. What it says on standard error can be waited for."""

    def __init__(self, folder: Path, *arguments: str, stderr: int | None = None) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            command(*arguments),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr is None else stderr,
            text=True,
        )
        if self.process.stderr is not None:
            reading = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
            reading.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()

    def says(self, words: str, times: int = 1) -> None:
        """Wait until so many lines have these words."""

        def said() -> bool:
            return sum(words in line for line in self.lines) >= times

        with self._changed:
            assert self._changed.wait_for(said, PATIENCE_S), f"{words!r} not in {self.lines}"

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)

    def end(self, number: signal.Signals | None = None) -> int:
        """Its exit code, after a signal if one is given; never with a traceback."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        assert not self.count("Traceback"), self.lines
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Role]]:
    """Start a role in the test's folder; killed, at the latest, when the test ends."""
    roles: list[Role] = []

    def begin(*arguments: str, stderr: int | None = None) -> Role:
        roles.append(Role(tmp_path, *arguments, stderr=stderr))
        return roles[-1]

    yield begin
    for role in roles:
        role.process.kill()
        role.process.wait()
        for stream in (role.process.stdout, role.process.stderr):
            if stream is not None:
                stream.close()


Start = Callable[..., Role]


def written(folder: Path, name: str = "small", steps: str = STEPS) -> None:
    (folder / "train.bin").write_bytes(bytes(range(200)) * 40)
    (folder / "validation.bin").write_bytes(bytes(range(200)) * 4)
    text = ONE_REGION.replace('"small"', f'"{name}"').replace(STEPS, steps)
    (folder / f"{name}.toml").write_text(text)


@contextmanager
def free_ports(count: int) -> Iterator[list[str]]:
    """Addresses to be started at later, that nobody else gets meanwhile."""
    holders = [socket.socket() for _ in range(count)]
    for holder in holders:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
    yield [f"127.0.0.1:{holder.getsockname()[1]}" for holder in holders]
    for holder in holders:
        holder.close()


def credited(address: str) -> int:
    return int(status_of_server(address, Security.plain())["credited"])


def goes_on(address: str, before: int) -> None:
    """Until more is credited than before."""
    wait_for(lambda: credited(address) > before)


@pytest.mark.smoke
def test_who_is_started_first_waits_and_says_so(start: Start, tmp_path: Path) -> None:
    """A worker before its server, which comes before the coordinator: then they train."""
    written(tmp_path)
    with free_ports(2) as (root, us):
        pass
    worker = start("worker", "--join", us, "--name", "0")
    server = start("server", "--region", "us", "--join", root, "--listen", us)
    for role, address in ((worker, us), (server, root)):
        role.says(f"waiting for the server at {address}: nothing listens there")
        role.says("next try in")
    coordinator = start("coordinator", "small.toml", "--listen", root, "--json")
    for role in (coordinator, server, worker):
        assert role.end() == ExitCode.DONE, role.lines
        assert role.count("the run is over") == 1
    for role in (worker, server):
        assert role.count("waiting for") == role.count("is there") == 1
    assert coordinator.process.stdout is not None
    assert json.loads(coordinator.process.stdout.read())["finished"]
    assert announced(tmp_path / "runs" / "small") is None  # nobody listens there any more


def test_an_interrupt_amid_the_start_ends_it_at_once(start: Start, tmp_path: Path) -> None:
    written(tmp_path)
    starting = start("coordinator", "small.toml", "--listen", "127.0.0.1:0")
    maps = Path(f"/proc/{starting.process.pid}/maps")
    while "libtorch" not in maps.read_text():  # it is busy importing
        assert starting.process.poll() is None
    assert starting.end(signal.SIGINT) == ExitCode.INTERRUPTED
    assert not starting.lines
    waiting = start("worker", "--join", "127.0.0.1:1")
    waiting.says("waiting for")
    assert waiting.end(signal.SIGINT) == ExitCode.INTERRUPTED


@pytest.mark.slow
def test_each_role_is_stopped_alone_and_goes_on(start: Start, tmp_path: Path) -> None:
    written(tmp_path, steps=MANY)
    with free_ports(2) as (root, us):
        pass

    def coordinator() -> Role:
        return start("coordinator", "small.toml", "--listen", root)

    def server() -> Role:
        return start("server", "--region", "us", "--join", root, "--listen", us)

    top, middle, worker = coordinator(), server(), start("worker", "--join", us, "--name", "0")
    worker.says("training on")
    goes_on(root, 0)

    assert worker.end(signal.SIGINT) == ExitCode.DONE
    assert worker.count("stopped after") == 1
    middle.says("us/0 has left")
    before = credited(root)
    worker = start("worker", "--join", us, "--name", "0")
    goes_on(root, before)

    assert middle.end(signal.SIGTERM) == ExitCode.DONE
    assert middle.count("the same command goes on from here") == 1
    worker.says("waiting for")
    before = credited(root)
    middle = server()
    middle.says("us/0 is connected")
    goes_on(root, before)

    before = credited(root)
    assert top.end(signal.SIGINT) == ExitCode.DONE
    middle.says("waiting for")
    top = coordinator()
    top.says("us is connected")
    assert credited(root) > 0  # it went on from what it had saved
    goes_on(root, before)
    assert worker.process.poll() is middle.process.poll() is None


@pytest.mark.slow
def test_children_of_a_coordinator_whose_address_gets_another_run_leave(
    start: Start, tmp_path: Path
) -> None:
    written(tmp_path, steps=MANY)
    written(tmp_path, "other", MANY)
    with free_ports(1) as (root,):
        pass
    top = start("coordinator", "small.toml", "--listen", root)
    middle = start("server", "--region", "us", "--join", root)
    top.says("us is connected")
    assert top.end(signal.SIGTERM) == ExitCode.DONE
    other = start("coordinator", "other.toml", "--listen", root)
    sentence = "this is a server of run 'other', not of 'small'"
    assert middle.end() == ExitCode.USER
    assert middle.lines[-1] == f"error: {root}: {sentence}"
    other.says(sentence)
    assert other.count("refused") == 1 and other.process.poll() is None


@pytest.mark.slow
def test_two_runs_do_not_collide_and_places_that_are_taken_are_refused(
    start: Start, tmp_path: Path
) -> None:
    written(tmp_path, steps=MANY)
    written(tmp_path, "other", MANY)
    written(tmp_path, "third", MANY)
    anywhere = ("--listen", "127.0.0.1:0")
    runs = [start("coordinator", f"{name}.toml", *anywhere) for name in ("small", "other")]
    addresses = []
    for run, name in zip(runs, ("small", "other"), strict=True):
        run.says("listening on")
        address = announced(tmp_path / "runs" / name)
        assert address is not None and run.lines[-1].endswith(address)
        addresses.append(address)
    assert addresses[0] != addresses[1]
    for arguments, sentence in (
        (("small.toml", *anywhere), "this run directory is in use by process"),
        (("third.toml", "--listen", addresses[0]), "cannot be listened on (Address already in use"),
        (("third.toml", "--listen", "0.0.0.0:0"), "so it needs certificates: give --certs DIR"),
    ):
        refused = start("coordinator", *arguments)
        assert refused.end() == ExitCode.USER
        assert len(refused.lines) == 1 and sentence in refused.lines[0]


@pytest.mark.slow
def test_nobody_has_to_read_what_a_coordinator_says(start: Start, tmp_path: Path) -> None:
    """Its output's other end is closed: it saves all the same."""
    written(tmp_path, steps=MANY)
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ("coordinator", "small.toml", "--listen", "127.0.0.1:0")
    role = start(*arguments, stderr=writing)
    os.close(writing)
    folder = tmp_path / "runs" / "small"
    while announced(folder) is None:
        assert role.process.poll() is None
    assert role.end(signal.SIGTERM) == ExitCode.DONE
    assert list(folder.glob("checkpoints/*/manifest.json"))


@pytest.mark.slow
def test_an_evaluation_follows_over_a_restart(start: Start, tmp_path: Path) -> None:
    written(tmp_path, steps=MANY)
    with free_ports(2) as (root, us):
        pass
    top = start("coordinator", "small.toml", "--listen", root)
    start("server", "--region", "us", "--join", root, "--listen", us)
    start("worker", "--join", us, "--name", "0")
    following = start("eval", "--follow", root, "--json")
    assert following.process.stdout is not None
    first = json.loads(following.process.stdout.readline())
    assert top.end(signal.SIGTERM) == ExitCode.DONE
    start("coordinator", "small.toml", "--listen", root)
    following.says("is there")
    later = json.loads(following.process.stdout.readline())
    while later["local_steps"] <= first["local_steps"]:
        later = json.loads(following.process.stdout.readline())
    following.process.stdout.readline()  # by the next one, that one has been reported
    assert following.end(signal.SIGINT) == ExitCode.DONE
    kept = [
        json.loads(line)
        for line in (tmp_path / "runs" / "small" / "loss.jsonl").read_text().splitlines()
    ]
    assert later["loss"] in [point["loss"] for point in kept]
