"""Where ``halos`` begins: heedful of signals before anything is imported that takes time."""

from __future__ import annotations

import contextlib
import os
import signal

SHOW_CURSOR = b"\x1b[?25h"


def leave(number: int, _: object = None) -> None:
    """End at once: there is nothing to save yet, and an exception amid an import may get lost."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)  # a live table hides it
    os._exit(128 + number)


def main() -> None:
    """Run a command. One that has something to save takes the signals over, and saves."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    from coordinator.cli import run

    run()


if __name__ == "__main__":
    main()
