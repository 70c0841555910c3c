"""Keeps a log readable when a peer does the same thing wrong again and again."""

from __future__ import annotations

import time

REMIND_S = 30.0
KNOWN = 1_000


class Repeats:
    """Tells what is news: a line that was not said yet, or not for a while."""

    def __init__(self, remind_s: float = REMIND_S) -> None:
        self._remind_s = remind_s
        self._said: dict[str, float] = {}  # when, the oldest first

    def news(self, line: str) -> bool:
        now = time.monotonic()
        if now < self._said.get(line, float("-inf")) + self._remind_s:
            return False
        self._said.pop(line, None)
        self._said[line] = now
        if len(self._said) > KNOWN:
            del self._said[next(iter(self._said))]
        return True
