"""A comparison of methods on a terminal: one table, or two below each other where it is narrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halos.simulation.units import BYTES, SECONDS, TOKENS, Unit, digits, shown, unit_for, wrapped

if TYPE_CHECKING:
    from halos.simulation.comparison import Comparison, Mean, Row

NAME_WIDTH = 22  # leaves room for the rest on 80 characters

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
        f"{first} sooner\nat its end": lambda row: sooner(row.overtaken),
    }


def worked() -> Cells:
    """How busy machines and links are, and what comes of it."""
    return {
        "final\nloss": lambda row: spread(row.final_loss, lambda value, _: f"{value:.3f}"),
        "workers\ncompute": lambda row: f"{row.utilization:.0%}",
        "wide-area\nlinks": lambda row: shown(row.wide_area_bytes, BYTES),
        "work\ndelivered": lambda row: f"{row.delivered:.0%}",
        "staleness\nmean, max": staleness,
    }


def _table(rows: Sequence[Row], cells: Cells, title: str) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), title=Text(title) if title else None, title_justify="left"
    )
    table.add_column("method", overflow="fold", vertical="bottom")
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(wrapped(row.method, NAME_WIDTH), *(cell(row) for cell in cells.values()))
    return table


def reached(row: Row, value: Mean | None, unit: Unit) -> str:
    if value is None:
        return "not reached"
    some = f" ({row.reached} of {row.seeds})" if row.reached < row.seeds else ""
    return spread(value, lambda one, beside: digits(unit.of(one), unit.of(beside))) + some


def spread(value: Mean | None, form: Callable[[float, float], str]) -> str:
    """Mean and standard deviation; ``form`` is told each and the mean."""
    if value is None:
        return ""
    mean = form(value.mean, value.mean)
    return mean if value.deviation is None else f"{mean} ± {form(value.deviation, value.mean)}"


def ratio(value: Mean | None) -> str:
    return "" if value is None else f"{digits(value.mean)}x"


def sooner(value: Mean | None) -> str:
    return "never" if value is None else f"{digits(value.mean)}x"


def staleness(row: Row) -> str:
    if row.mean_staleness is None:
        return ""
    return f"{row.mean_staleness:.1f}, {row.max_staleness}"
