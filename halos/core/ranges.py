"""Sets of sample positions as sorted, disjoint, half-open ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halos.core.samples import Range


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
        starts, ends = self.starts, self.ends
        i = bisect_left(starts, start)  # the first that begins there or later
        if (i > 0 and ends[i - 1] > start) or (i < len(starts) and starts[i] < end):
            raise ValueError(f"positions {start} to {end} are partly here already")
        self.total += end - start
        joins_left = i > 0 and ends[i - 1] == start
        joins_right = i < len(starts) and starts[i] == end
        if joins_left and joins_right:
            ends[i - 1] = ends[i]
            del starts[i], ends[i]
        elif joins_left:
            ends[i - 1] = end
        elif joins_right:
            starts[i] = start
        else:
            starts.insert(i, start)
            ends.insert(i, end)

    def remove(self, start: int, end: int) -> None:
        """Remove positions that are here; ``ValueError`` if one is not."""
        if start >= end:
            return
        starts, ends = self.starts, self.ends
        i = bisect_right(starts, start) - 1  # the last that begins there or before
        if i < 0 or end > ends[i]:
            raise ValueError(f"positions {start} to {end} are not all here")
        self.total -= end - start
        left, right = starts[i], ends[i]
        if left == start and right == end:
            del starts[i], ends[i]
        elif left == start:
            starts[i] = end
        elif right == end:
            ends[i] = start
        else:
            ends[i] = start
            starts.insert(i + 1, end)
            ends.insert(i + 1, right)
