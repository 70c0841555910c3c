"""A run on the terminal: a live table where there is one, else a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from halos.runtime.status import Point, RegionStatus, RunStatus

LINE_EVERY_S = 10.0
CURVE_WIDTH, CURVE_HEIGHT = 60, 8
EIGHTHS = " ▁▂▃▄▅▆▇█"


class RunView:
    """Shows a run's progress until it is left as a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_line = 0.0
        self._earlier: tuple[float, int] | None = None
        self._rate = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: RunStatus, points: Sequence[Point]) -> None:
        """Bring the terminal up to date."""
        self._measure(status)
        if self._live is not None:
            self._live.update(self._picture(status, points), refresh=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self._console.print(line(status, points, self._rate), highlight=False, soft_wrap=True)

    def _measure(self, status: RunStatus) -> None:
        """Tokens a second, over the last seconds."""
        tokens = sum(region.tokens for region in status.regions)
        if self._earlier is None:
            self._earlier = status.elapsed_s, tokens
        elapsed = status.elapsed_s - self._earlier[0]
        if elapsed >= 2:
            self._rate = (tokens - self._earlier[1]) / elapsed
            self._earlier = status.elapsed_s, tokens

    def _picture(self, status: RunStatus, points: Sequence[Point]) -> RenderableType:
        return overview(status, points, self._rate)


def overview(
    status: RunStatus, points: Sequence[Point], rate: float | None = None
) -> RenderableType:
    """All there is to see of a run. ``rate`` in tokens a second, by default the run's own."""
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        Text(status.name, style="bold"),
        ProgressBar(total=status.total, completed=status.credited, width=40),
        f"{status.credited / status.total:.0%}",
        f"{clock(status.elapsed_s)} elapsed{remaining(status)}",
    )
    return Group(
        bar,
        "",
        regions_table(status),
        "",
        totals(status, status.tokens_per_s if rate is None else rate),
        *refused(status),
        *curve(points),
    )


def regions_table(status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("region")
    for name in ("workers", "updates", "pushes", "staleness", "loss", "tokens"):
        table.add_column(name, justify="right")
    linked = any(region.sent_bytes for region in status.regions)
    if linked:
        table.add_column("link", justify="right")
    table.add_column("")
    for region in status.regions:
        table.add_row(
            region.name,
            workers_of(region),
            str(region.version),
            str(region.pushes),
            "" if region.staleness is None else f"{region.staleness:.1f}",
            "" if region.loss is None else f"{region.loss:.3f}",
            f"{region.tokens:,}",
            *([f"{(region.sent_bytes + region.received_bytes) / 1e6:,.1f} MB"] if linked else []),
            state_of(region),
        )
    return table


def workers_of(region: RegionStatus) -> str:
    """How many are here, and of how many where some are missing."""
    if region.workers == region.expected:
        return str(region.workers)
    return f"{region.workers} of {region.expected}"


def state_of(region: RegionStatus) -> str:
    if not region.connected:
        return "not here"
    if region.waiting:
        return f"{region.waiting} waiting for samples"
    return "pushing" if region.in_flight else ""


def totals(status: RunStatus, rate: float) -> str:
    share = status.computing_share
    computing = "" if share is None else f" · workers computing {share:.0%} of the time"
    return (
        f"credited {status.credited:,} of {status.total:,} samples · delivered "
        f"{status.delivered:,} · {rate:,.0f} tokens/s{computing}"
    )


def refused(status: RunStatus) -> list[str]:
    return [f"{count:,} refused ({reason})" for reason, count in status.refusals.items()]


def curve(points: Sequence[Point]) -> list[RenderableType]:
    """Validation loss over local steps, as blocks."""
    if len(points) < 2:
        return []
    from numpy import interp, linspace

    steps = [point.local_steps for point in points]
    columns = linspace(steps[0], steps[-1], CURVE_WIDTH)
    losses = interp(columns, steps, [point.loss for point in points]).tolist()
    low, high = min(losses), max(losses)
    scale = CURVE_HEIGHT * 8 / (high - low or 1.0)
    levels = [max(1, math.ceil((loss - low) * scale)) for loss in losses]
    rows: list[RenderableType] = ["", f"validation loss, nats a token (now {points[-1].loss:.3f})"]
    for row in reversed(range(CURVE_HEIGHT)):
        label = {CURVE_HEIGHT - 1: f"{high:6.3f}", 0: f"{low:6.3f}"}.get(row, " " * 6)
        blocks = "".join(EIGHTHS[min(8, max(0, level - row * 8))] for level in levels)
        rows.append(Text.assemble((label, "dim"), " ", (blocks, "cyan")))
    first, last = f"{steps[0]:,}", f"{steps[-1]:,} steps"
    rows.append(Text(f"{'':7}{first}{last:>{CURVE_WIDTH - len(first)}}", "dim"))
    return rows


def line(status: RunStatus, points: Sequence[Point], rate: float) -> str:
    loss = f"  validation loss {points[-1].loss:.3f}" if points else ""
    return (
        f"{clock(status.elapsed_s)}  {status.credited / status.total:4.0%}  "
        f"local steps {status.local_steps:,}  {rate:,.0f} tokens/s{loss}"
    )


def remaining(status: RunStatus) -> str:
    done = status.credited / status.total
    if done < 0.02:
        return ""
    return f", {clock(status.elapsed_s * (1 - done) / done)} to go"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
