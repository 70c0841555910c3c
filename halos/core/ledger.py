"""Which samples are where: issued to whom, credited, delivered (DESIGN 5).

A position is a sample's place in the whole run. At any moment a server holds each position that
was entrusted to it in exactly one of: ``sections`` (the root's, not yet issued), ``fresh``,
``returned``, ``held`` by one child, or retired. Moving between them is all that this module does,
and a move from a place where the position is not raises ``ValueError``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from halos.core.messages import NodeId
from halos.core.ranges import RangeSet
from halos.core.samples import Block, Range, Report


@dataclass(slots=True)
class Section:
    """Positions of one data set over the whole run; ``end`` is ``None`` for a run without end."""

    dataset: str
    origin: int
    next: int
    end: int | None

    @property
    def remaining(self) -> float:
        return math.inf if self.end is None else self.end - self.next

    def cut(self, samples: int, progress: int) -> Block:
        """The next up to ``samples`` positions, issued when the run's progress is ``progress``."""
        start = self.next
        self.next = start + samples if self.end is None else min(start + samples, self.end)
        return Block(self.dataset, self.origin, start, self.next, progress)


def sections_for(samples: dict[str, int | None]) -> list[Section]:
    """One section a data set, end to end. Only a single data set may be without end.

    ``samples`` maps a data set's name to the samples that the run takes from it.
    """
    sections: list[Section] = []
    origin = 0
    for dataset, count in samples.items():
        if count is None and len(samples) > 1:
            raise ValueError("a run without end takes from one data set only")
        end = None if count is None else origin + count
        sections.append(Section(dataset, origin, origin, end))
        origin = end or 0
    return sections


@dataclass(slots=True)
class Ledger:
    """The books of one server. ``stock``: positions in ``fresh`` and ``returned``."""

    sections: list[Section] = field(default_factory=list)
    fresh: list[Block] = field(default_factory=list)
    returned: list[Block] = field(default_factory=list)
    held: dict[NodeId, RangeSet] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)
    seen_progress: int = 0
    credited: RangeSet = field(default_factory=RangeSet)
    delivered: RangeSet = field(default_factory=RangeSet)
    stock: int = field(init=False)

    def __post_init__(self) -> None:
        self.stock = sum([b.end - b.start for b in (*self.fresh, *self.returned)])

    @property
    def progress(self) -> int:
        """Samples issued over the whole run, as far as this server knows."""
        if self.sections:
            return sum([s.next - s.origin for s in self.sections])
        return self.seen_progress

    @property
    def total(self) -> int | None:
        """Samples in the whole run, at the root; ``None`` without end."""
        ends = [s.end for s in self.sections]
        if not ends or None in ends:
            return None
        return sum(s.end - s.origin for s in self.sections if s.end is not None)

    @property
    def all_credited(self) -> bool:
        """At the root: whether nothing of the run is left to do."""
        return self.credited.total == self.total

    @property
    def any_left(self) -> bool:
        """Whether anything could be issued now, to a child that has all data sets."""
        return self.stock > 0 or any(s.next != s.end for s in self.sections)

    def available(self, datasets: Collection[str] | None = None) -> float:
        """Positions that could be issued now, to a child that has these data sets."""
        count: float = 0
        if self.stock:
            for pool in (self.returned, self.fresh):
                for block in pool:
                    if datasets is None or block.dataset in datasets:
                        count += block.end - block.start
        for section in self.sections:
            if datasets is None or section.dataset in datasets:
                count += section.remaining
        return count

    def take(
        self, samples: int, child: NodeId, datasets: Collection[str] | None = None
    ) -> list[Block]:
        """Issue up to ``samples`` positions of one data set to ``child``: returned ones first."""
        taken: list[Block] = []
        missing = samples
        if self.stock:
            if self.returned:
                missing = _take_from(self.returned, missing, datasets, taken, self.progress)
            missing = _take_from(self.fresh, missing, datasets, taken, None)
            self.stock -= samples - missing
        if missing > 0 and self.sections:
            section = self._section((taken[0].dataset,) if taken else datasets)
            if section is not None:
                taken.append(section.cut(missing, self.progress))
        if not taken:
            return taken
        holding = self.held.get(child)
        if holding is None:
            holding = self.held[child] = RangeSet()
        for block in taken:
            holding.add(block.start, block.end)
            self.origins[block.origin] = block.dataset
            if block.progress > self.seen_progress:
                self.seen_progress = block.progress
        return taken

    def receive(self, blocks: Iterable[Block]) -> None:
        """Blocks that the parent granted."""
        for block in blocks:
            self.origins[block.origin] = block.dataset
            self.seen_progress = max(self.seen_progress, block.progress)
            self.fresh.append(block)
            self.stock += block.end - block.start

    def give_back(self, child: NodeId) -> None:
        """All that ``child`` holds may be issued again."""
        borders = sorted(self.origins)
        for start, end in self.held.pop(child, RangeSet()):
            self.stock += end - start
            # Sequences of data sets lie end to end: a range may reach over from one into the next.
            cuts = [start, *(origin for origin in borders if start < origin < end), end]
            for first, last in pairwise(cuts):
                origin = borders[bisect_right(borders, first) - 1]
                self.returned.append(Block(self.origins[origin], origin, first, last, 0))
        self.returned.sort(key=lambda b: b.start)

    def forget(self) -> None:
        """A parent took back everything entrusted to this server."""
        self.fresh.clear()
        self.returned.clear()
        self.held.clear()
        self.stock = 0

    def holds(self, child: NodeId, ranges: Iterable[Range]) -> bool:
        """Whether ``child`` holds each of ``ranges``, and each only once among them."""
        try:
            asked = RangeSet.of(ranges)
        except ValueError:
            return False
        holding = self.held.get(child, RangeSet())
        return all(holding.covers(start, end) for start, end in asked)

    def retire(self, child: NodeId, report: Report) -> None:
        """The reported positions were trained on: never issue them again."""
        held = self.held[child]
        for start, end in report.contained:
            held.remove(start, end)
        for start, end in report.dropped:
            held.remove(start, end)

    def credit(self, report: Report) -> None:
        """At the root: enter retired positions into the run's books."""
        for start, end in report.contained:
            self.credited.add(start, end)
            self.delivered.add(start, end)
        for start, end in report.dropped:
            self.credited.add(start, end)

    def _section(self, datasets: Collection[str] | None) -> Section | None:
        """The data set that is furthest behind, among those with samples left."""
        able = [
            s
            for s in self.sections
            if s.remaining > 0 and (datasets is None or s.dataset in datasets)
        ]
        return max(able, key=_share_left, default=None)


def _share_left(section: Section) -> float:
    if section.end is None:
        return 1.0
    return section.remaining / (section.end - section.origin)


def _take_from(
    pool: list[Block],
    samples: int,
    datasets: Collection[str] | None,
    taken: list[Block],
    progress: int | None,
) -> int:
    """Move up to ``samples`` positions, of one data set, from the front of ``pool`` to ``taken``.

    ``progress`` replaces that of the blocks; without it a later part of a block counts as issued
    later by as many samples as lie before it. Returns how many positions are still missing.
    """
    index = 0
    while index < len(pool) and samples > 0:
        block = pool[index]
        wanted = (taken[0].dataset,) if taken else datasets
        if wanted is not None and block.dataset not in wanted:
            index += 1
            continue
        size = min(samples, block.end - block.start)
        samples -= size
        middle = block.start + size
        at = block.progress if progress is None else progress
        taken.append(Block(block.dataset, block.origin, block.start, middle, at))
        if middle == block.end:
            del pool[index]
        else:
            later = block.progress + size
            pool[index] = Block(block.dataset, block.origin, middle, block.end, later)
    return samples


def totals(total: Report, report: Report) -> Report:
    """Sum of the counts of two reports, ranges apart."""
    return Report(
        updates=total.updates + report.updates,
        local_steps=total.local_steps + report.local_steps,
        tokens=total.tokens + report.tokens,
        loss_tokens=total.loss_tokens + report.loss_tokens,
    )


@dataclass(slots=True)
class Pending:
    """What a server applied and has not reported to its parent yet."""

    updates: int = 0
    local_steps: int = 0
    tokens: int = 0
    loss_tokens: float = 0.0
    contained: RangeSet = field(default_factory=RangeSet)
    dropped: RangeSet = field(default_factory=RangeSet)

    def add(self, report: Report) -> None:
        self.updates += report.updates
        self.local_steps += report.local_steps
        self.tokens += report.tokens
        self.loss_tokens += report.loss_tokens
        for start, end in report.contained:
            self.contained.add(start, end)
        for start, end in report.dropped:
            self.dropped.add(start, end)

    def drop(self) -> None:
        """What is contained so far will not be in any push (``in_flight = "drop"``)."""
        for start, end in self.contained:
            self.dropped.add(start, end)
        self.contained = RangeSet()

    def __bool__(self) -> bool:
        return bool(self.updates or self.contained.total or self.dropped.total)

    def to_report(self) -> Report:
        return Report(
            updates=self.updates,
            local_steps=self.local_steps,
            tokens=self.tokens,
            loss_tokens=self.loss_tokens,
            contained=self.contained.as_tuple(),
            dropped=self.dropped.as_tuple(),
        )
