"""How far a computation is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from coordinator.view import LINE_EVERY_S, clock

DRAW_EVERY_S = 0.1


class ShareBar:
    """Shows what share of ``what`` is done until it is left as a context."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[also]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=1.0, also="")
        self._began = time.monotonic()
        self._next = 0.0
        self._also = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, share: float, also: str = "") -> None:
        """``share`` from 0 to 1. As often as you like; a change of ``also`` shows at once."""
        now = time.monotonic()
        if now < self._next and also == self._also:
            return
        self._also = also
        if self._console.is_terminal:
            self._next = now + DRAW_EVERY_S
            self._bar.update(self._task, completed=share, also=also)
            return
        self._next = now + LINE_EVERY_S
        line = f"{clock(now - self._began)}  {share:4.0%}  {self._what}  {also}"
        self._console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
