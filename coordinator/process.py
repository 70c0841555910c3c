"""What the commands of long-lived processes share: options, logging, signals, attachment."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halos.wire.security import Security

Certs = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="This process's certificate and token; see `halos certs`."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow plain text beyond this machine. Trusted networks!")
]
Listen = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: any that is free.")
]
Join = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="The server to join; it may come later.")
]
Trace = Annotated[
    Path | None, typer.Option(help="Write every event to this file, one JSON line each.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Attached = Annotated[
    bool, typer.Option("--attached", help="End when standard input closes.", hidden=True)
]


def security_of(certs: Path | None) -> Security:
    """Raises ``UserError`` if the folder is not one that ``halos certs issue`` made."""
    from halos.wire.security import Security

    return Security.from_folder(certs) if certs is not None else Security.plain()


def log_to_stderr() -> None:
    """One line an event on standard error, with the time: for a process that nobody watches."""
    logging.basicConfig(
        format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING, force=True
    )
    logging.getLogger("halos").setLevel(logging.INFO)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM or a closed terminal once: stop in good order. Twice: end at once."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}

    def stop_once(*_: object) -> None:
        for number in signals:
            signal.signal(number, before[number])
        stop()

    for number in signals:
        signal.signal(number, stop_once)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, before[number])


def end_with_standard_input() -> None:
    """Have this process stop as by SIGTERM when who started it goes away, however that ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="attached", daemon=True).start()
