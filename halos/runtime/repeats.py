"""Keeps a log readable when a peer does the same thing wrong again and again."""

from __future__ import annotations

import logging
import time

from halos.core.membership import member_of
from halos.core.messages import Reject
from halos.runtime.dispatcher import Step

log = logging.getLogger(__name__)

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


class RefusalLog:
    """An observer that tells of what a server does not accept from its children."""

    def __init__(self) -> None:
        self._repeats = Repeats()

    def __call__(self, step: Step) -> None:
        for effect in step.effects:
            if isinstance(effect, Reject) and effect.reason != "fenced":
                line = f"refused {member_of(effect.to)}: {effect.detail}"
                if self._repeats.news(line):
                    log.warning("%s", line)
