"""Times, counts, bytes and long names as people write them. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """``size``: how many of the basic unit (seconds, tokens, bytes) one is."""

    name: str
    size: float

    def of(self, amount: float) -> float:
        return amount / self.size


SECONDS = (Unit("s", 1), Unit("min", 60), Unit("h", 3600), Unit("days", 86400))
TOKENS = (Unit("", 1), Unit("thousand", 1e3), Unit("M", 1e6), Unit("G", 1e9), Unit("T", 1e12))
BYTES = (Unit("B", 1), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9), Unit("TB", 1e12))
NAME_WIDTH = 34  # characters of a method's name on one line
ENOUGH = {"min": 10, "h": 3, "days": 3}  # of a unit of time, before it is easier to read


def unit_for(amount: float, units: Sequence[Unit]) -> Unit:
    """The largest unit in which ``amount`` is no small number."""
    chosen = units[0]
    for unit in units[1:]:
        if unit.of(amount) >= ENOUGH.get(unit.name, 1):
            chosen = unit
    return chosen


def shown(amount: float, units: Sequence[Unit]) -> str:
    unit = unit_for(amount, units)
    return f"{digits(unit.of(amount))} {unit.name}".strip()


def digits(value: float, beside: float | None = None) -> str:
    """Three of them, and more only before the point; as many places as ``beside`` has."""
    size = abs(value if beside is None else beside)
    places = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value:,.{places}f}" if size else "0"


def wrapped(method: str, width: int = NAME_WIDTH) -> str:
    """A long name on several lines, broken where settings begin."""
    lines = [""]
    for part in method.split(":"):
        piece = part if lines == [""] else f":{part}"
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("  ")
        lines[-1] += piece
    return "\n".join(lines)
