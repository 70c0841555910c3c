"""``halos netem`` as a process: what it says, what signals do, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest

from coordinator.netem import netem
from halos.errors import UserError
from halos.wire.link import split_address

# The function itself, so that this holds whatever the command line makes of it.
COMMAND = "import typer; from coordinator.netem import netem; typer.run(netem)"


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def event(process: subprocess.Popen[str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(line(process.stdout))
    return said


@pytest.mark.smoke
@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGINT])
def test_carries_is_cut_and_mended_and_ends(last: signal.Signals) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as target,
        started(
            *("--listen", "127.0.0.1:0", "--to", "localhost:{1}".format(*target.getsockname())),
            *("--rate-mbps", "100", "--rtt-ms", "2", "--json"),
        ) as process,
    ):
        address = event(process)["address"]
        with socket.create_connection(split_address("to", address)) as near:
            far, _ = target.accept()
            with far:
                near.sendall(b"ping")
                assert far.recv(4, socket.MSG_WAITALL) == b"ping"
                process.send_signal(signal.SIGUSR1)
                assert event(process) == {"event": "cut", "address": address}
                near.sendall(b"while cut")
                process.send_signal(signal.SIGUSR2)
                assert event(process)["event"] == "mended"
                assert far.recv(9, socket.MSG_WAITALL) == b"while cut"
                far.sendall(b"pong")
                assert near.recv(4, socket.MSG_WAITALL) == b"pong"
        process.send_signal(last)
        ended = {"event": "ended", "address": address, "up_bytes": 13, "down_bytes": 4}
        assert event(process) == ended
        assert process.wait() == 0
        assert line(process.stderr) == ""


@pytest.mark.smoke
def test_says_what_it_emulates_and_that_the_target_is_not_there() -> None:
    with started("--to", "server.region.invalid:7443", "--rtt-ms", "80") as process:
        said = line(process.stdout)
        assert said.startswith("Listening on 127.0.0.1:")
        assert said.endswith(", to server.region.invalid:7443: no limit, round trip 80 ms.\n")
        with socket.create_connection(split_address("to", said.split()[2].rstrip(","))):
            reported = line(process.stderr)
            assert reported.startswith("server.region.invalid:7443 cannot be reached: ")
        process.send_signal(signal.SIGTERM)
        assert line(process.stdout) == "Carried 0 bytes up and 0 bytes down.\n"
        assert process.wait() == 0


def test_starts_without_torch() -> None:
    check = (
        "import sys, coordinator.netem, halos.wire.link\n"
        "print({'torch', 'grpc'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rate_mbps": 0.0}, "rate_mbps: 0.0 is not allowed; give a number greater than 0"),
        ({"rtt_ms": -1.0}, "rtt_ms: -1.0 is not allowed; give a number of at least 0"),
        ({"rtt_ms": float("nan")}, "rtt_ms: nan is not allowed; give a finite number"),
        ({"to": "7443"}, 'to: "7443" is not allowed; give HOST:PORT'),
        ({"listen": "here"}, 'listen: "here" is not allowed; give HOST:PORT'),
    ],
)
def test_a_mistake_is_one_sentence(wrong: dict[str, Any], said: str) -> None:
    given = {"to": "127.0.0.1:1", "listen": "127.0.0.1:0", "rate_mbps": None, "rtt_ms": 0.0}
    with pytest.raises(UserError) as caught:
        netem(**given | wrong)
    assert str(caught.value) == said
