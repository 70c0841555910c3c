"""Runs whose processes come, go and come again, over both drivers that keep real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

END_S = 240.0
LOOK_S = 0.05  # where nobody says that something has changed


class Watch:
    """Waits for what other threads do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + END_S
        while not condition():
            assert time.monotonic() < ends, f"never: {what}"
            with self._changed:
                self._changed.wait(LOOK_S)
