"""What the commands of long-lived processes share: options, logging, signals, attachment."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.__main__ import leave

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
Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The folder of the run's token files on this machine."),
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
    """Ctrl-C, SIGTERM or a closed terminal once: stop in good order. Twice: end at once.

    ``stop`` is called in a thread of its own, whatever the main thread waits for or has locked.
    Under nohup a closed terminal is no reason to stop. Whoever sends the others means it, even to
    a process that a script started in the background, where SIGINT begins as ignored.
    """
    heeded = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heeded.append(signal.SIGHUP)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_heed, args=(reading, heeded, stop), daemon=True).start()
    waker = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in heeded}
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(waker)
        os.close(writing)


def _heed(reading: int, heeded: Sequence[int], stop: Callable[[], None]) -> None:
    """Python writes the number of each signal to the other end."""
    stopping = False
    with os.fdopen(reading, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] not in heeded:
                continue
            if stopping:
                leave(number[0])
            stopping = True
            stop()


def end_with_standard_input() -> None:
    """Have this process stop as by SIGTERM when who started it goes away, however that ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="attached", daemon=True).start()
