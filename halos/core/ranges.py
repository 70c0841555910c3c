"""Sets of sample positions as sorted, disjoint, half-open ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halos.core.messages import Range


@dataclass(slots=True)
class RangeSet:
    """Positions held as few ranges: adjacent ones are joined.

    ``starts`` and ``ends`` are parallel and sorted; ``total`` is the number of positions.
    """

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    total: int = 0

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> RangeSet:
        """The union of disjoint ``ranges``. Raises ``ValueError`` when two overlap."""
        result = cls()
        for start, end in ranges:
            result.add(start, end)
        return result

    def __iter__(self) -> Iterator[Range]:
        return zip(self.starts, self.ends, strict=True)

    def __len__(self) -> int:
        return len(self.starts)

    def as_tuple(self) -> tuple[Range, ...]:
        return tuple(self)

    def covers(self, start: int, end: int) -> bool:
        """Whether every position of ``[start, end)`` is here."""
        i = bisect_right(self.starts, start) - 1
        return start >= end or (i >= 0 and end <= self.ends[i])

    def touches(self, start: int, end: int) -> bool:
        """Whether any position of ``[start, end)`` is here."""
        i = bisect_right(self.ends, start)
        return start < end and i < len(self.starts) and self.starts[i] < end

    def add(self, start: int, end: int) -> None:
        """Add positions that are not here yet; ``ValueError`` if one is."""
        if start >= end:
            return
        if self.touches(start, end):
            raise ValueError(f"positions {start} to {end} are partly here already")
        first = bisect_left(self.ends, start)  # a left neighbour that ends at start is joined
        last = bisect_right(self.starts, end)  # a right neighbour that starts at end is joined
        self.total += end - start
        if first < last:
            start = min(start, self.starts[first])
            end = max(end, self.ends[last - 1])
        self.starts[first:last] = [start]
        self.ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Remove positions that are here; ``ValueError`` if one is not."""
        if start >= end:
            return
        if not self.covers(start, end):
            raise ValueError(f"positions {start} to {end} are not all here")
        i = bisect_right(self.starts, start) - 1
        left, right = self.starts[i], self.ends[i]
        pieces = [p for p in ((left, start), (end, right)) if p[0] < p[1]]
        self.starts[i : i + 1] = [p[0] for p in pieces]
        self.ends[i : i + 1] = [p[1] for p in pieces]
        self.total -= end - start
