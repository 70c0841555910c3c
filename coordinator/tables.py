"""A comparison of methods on a terminal: one table, or two below each other where it is narrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from halos.simulation.units import BYTES, SECONDS, TOKENS, Unit, digits, shown, unit_for

if TYPE_CHECKING:
    from halos.simulation.comparison import Comparison, Mean, Row

NAME_WIDTH = 34

Cells = Mapping[str, Callable[["Row"], str]]


def comparison_tables(compared: Comparison, first: str, console: Console) -> list[Table]:
    """With as many rows as methods."""
    learning, working = learned(compared, first), worked()
    title = f"{compared.environment}: to a loss of {compared.target_loss:.3f}"
    whole = _table(compared.rows, {**learning, **working}, title)
    unbounded = console.options.update(max_width=10 * console.width)
    if console.measure(whole, options=unbounded).maximum <= console.width:
        return [whole]
    return [_table(compared.rows, learning, title), _table(compared.rows, working, "")]


def learned(compared: Comparison, first: str) -> Cells:
    """How soon a method learns, and how much."""
    times = [row.time_s.mean for row in compared.rows if row.time_s]
    amounts = [row.tokens.mean for row in compared.rows if row.tokens]
    time, tokens = (
        unit_for(min(times, default=0), SECONDS),
        unit_for(max(amounts, default=0), TOKENS),
    )
    return {
        f"time to it\n({time.name})": lambda row: reached(row, row.time_s, time),
        f"tokens to it\n({tokens.name or 'each'})": lambda row: reached(row, row.tokens, tokens),
        f"time, of\n{first}'s": lambda row: ratio(row.relative_time),
        f"{first} at its\nlast loss": lambda row: sooner(row.overtaken),
        "final\nloss": lambda row: spread(row.final_loss, lambda value: f"{value:.3f}"),
    }


def worked() -> Cells:
    """How busy machines and links are, and what comes of it."""
    return {
        "all the\ntime": lambda row: shown(row.elapsed_s, SECONDS),
        "workers\ncompute": lambda row: f"{row.utilization:.0%}",
        "wide-area\nlinks": lambda row: shown(row.wide_area_bytes, BYTES),
        "work\ndelivered": lambda row: f"{row.delivered:.0%}",
        "staleness\nmean, max": staleness,
    }


def _table(rows: Sequence[Row], cells: Cells, title: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=title or None, title_justify="left")
    table.add_column("method", overflow="fold", max_width=NAME_WIDTH, vertical="bottom")
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.method, *(cell(row) for cell in cells.values()))
    return table


def reached(row: Row, value: Mean | None, unit: Unit) -> str:
    if value is None:
        return "not reached"
    some = f" ({row.reached} of {row.seeds})" if row.reached < row.seeds else ""
    return spread(value, lambda amount: digits(unit.of(amount))) + some


def spread(value: Mean | None, form: Callable[[float], str]) -> str:
    """Mean and standard deviation."""
    if value is None:
        return ""
    return form(value.mean) + (f" ± {form(value.deviation)}" if value.deviation is not None else "")


def ratio(value: Mean | None) -> str:
    return "" if value is None else f"{digits(value.mean)}x"


def sooner(value: Mean | None) -> str:
    return "never" if value is None else f"{digits(value.mean)}x sooner"


def staleness(row: Row) -> str:
    if row.mean_staleness is None:
        return ""
    return f"{row.mean_staleness:.1f}, {row.max_staleness}"
