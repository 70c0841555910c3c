"""A run on the terminal: a live table where there is one, else a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from halos.runtime.status import Point, RegionStatus, RunStatus

LINE_EVERY_S = 10.0
CURVE_WIDTH, CURVE_HEIGHT = 60, 8
CURVE_MARGIN = 7  # left of it, for the scale
BAR_WIDTH = range(10, 41)
LEFT_OUT = ("staleness", "pushes", "updates", "link")  # where there is no room, in this order
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
        self.put(
            lambda: overview(self._console, status, points, self._rate),
            lambda: line(status, points, self._rate),
        )

    def put(self, picture: Callable[[], RenderableType], line: Callable[[], str]) -> None:
        """Show ``picture`` in place of the one before, or a line now and then."""
        if self._live is not None:
            self._live.update(picture(), refresh=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self._console.print(line(), highlight=False, soft_wrap=True)

    def _measure(self, status: RunStatus) -> None:
        """Tokens a second, over the last seconds."""
        tokens = sum(region.tokens for region in status.regions)
        if self._earlier is None:
            self._earlier = status.elapsed_s, tokens
        elapsed = status.elapsed_s - self._earlier[0]
        if elapsed >= 2:
            self._rate = (tokens - self._earlier[1]) / elapsed
            self._earlier = status.elapsed_s, tokens


def overview(
    console: Console, status: RunStatus, points: Sequence[Point], rate: float | None = None
) -> RenderableType:
    """All there is to see of a run, as broad as ``console``.

    ``rate`` in tokens a second, by default the run's own.
    """
    width = console.width
    return Group(
        *heading(status, width),
        "",
        regions_table(console, status.regions),
        "",
        totals(status, status.tokens_per_s if rate is None else rate),
        *refused(status),
        *curve(points, min(CURVE_WIDTH, width - CURVE_MARGIN)),
    )


def server_overview(console: Console, told: Mapping[str, Any]) -> RenderableType:
    """What one region's server tells of itself, as ``halos status`` gets it."""
    from halos.runtime.status import region_told

    region = region_told(told["name"], told["expected"][told["name"]], told)
    return Group(server_line(told), "", regions_table(console, [region]))


def server_line(told: Mapping[str, Any]) -> str:
    parent = "connected to" if told["link"]["connected"] else "without"
    return f"{told['name']}, a region of run {told['run']}, is {parent} its parent"


def heading(status: RunStatus, width: int) -> list[RenderableType]:
    """How far the run is; the times on a line of their own where there is no room beside."""
    share, times = f"{status.credited / status.total:.0%}", f"{clock(status.elapsed_s)} elapsed"
    times += remaining(status)
    beside = [Text(status.name, style="bold"), Text(share), Text(times)]
    room = width - sum(text.cell_len + 2 for text in beside)
    below: list[RenderableType] = []
    if room < BAR_WIDTH.start:
        below = [beside.pop()]
        room = width - sum(text.cell_len + 2 for text in beside)
    bar = ProgressBar(
        total=status.total,
        completed=status.credited,
        width=min(max(room, BAR_WIDTH.start), BAR_WIDTH.stop - 1),
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_row(beside[0], bar, *beside[1:])
    return [grid, *below]


def regions_table(console: Console, regions: Sequence[RegionStatus]) -> Table:
    """One row a region, with as many columns as there is room for."""
    unbounded = console.options.update(max_width=10 * console.width)
    for count in range(len(LEFT_OUT)):
        table = _table(regions, LEFT_OUT[:count])
        if console.measure(table, options=unbounded).maximum <= console.width:
            return table
    return _table(regions, LEFT_OUT)


def _table(regions: Sequence[RegionStatus], left_out: Sequence[str]) -> Table:
    linked = any(region.sent_bytes for region in regions)
    cells: dict[str, Callable[[RegionStatus], str]] = {
        "region": lambda region: region.name,
        "workers": workers_of,
        "updates": lambda region: str(region.version),
        "pushes": lambda region: str(region.pushes),
        "staleness": lambda region: "" if region.staleness is None else f"{region.staleness:.1f}",
        "loss": lambda region: "" if region.loss is None else f"{region.loss:.3f}",
        "tokens": lambda region: f"{region.tokens:,}",
        "link": lambda region: f"{(region.sent_bytes + region.received_bytes) / 1e6:,.1f} MB",
        "": state_of,
    }
    shown = [n for n in cells if n not in left_out and (n != "link" or linked)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in shown:
        table.add_column(name, justify="left" if name in ("region", "") else "right")
    for region in regions:
        table.add_row(*(cells[name](region) for name in shown))
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


def curve(points: Sequence[Point], width: int = CURVE_WIDTH) -> list[RenderableType]:
    """Validation loss over local steps, as blocks."""
    if len(points) < 2:
        return []
    from numpy import interp, linspace

    steps = [point.local_steps for point in points]
    columns = linspace(steps[0], steps[-1], width)
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
    rows.append(Text(f"{'':7}{first}{last:>{width - len(first)}}", "dim"))
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
