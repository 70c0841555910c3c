"""How samples are named: leases, blocks, and reports of what became of them.

Positions and ranges are half-open and count samples of the whole run.
"""

from __future__ import annotations

from halos.core.frozen import frozen

Range = tuple[int, int]


@frozen
class Lease:
    """Samples that one worker trains on, exactly once in the whole run.

    ``ranges`` are run-wide positions; those of ``dataset`` begin at ``origin``, so that
    ``position - origin`` indexes the data set's own sequence (over all its epochs).
    ``progress`` is the number of samples issued over the whole run when this was issued.
    """

    id: str
    dataset: str
    origin: int
    ranges: tuple[Range, ...]
    progress: int

    @property
    def samples(self) -> int:
        count = 0
        for start, end in self.ranges:
            count += end - start
        return count


@frozen
class Block:
    """Samples that a parent granted to a child server, from which it cuts leases."""

    dataset: str
    origin: int
    start: int
    end: int
    progress: int


@frozen
class Report:
    """What a server did since its last push, as told to its parent.

    ``contained``: ranges whose change is in the pushed update. ``dropped``: ranges that were
    credited but whose change never enters a push (``in_flight = "drop"``).
    """

    updates: int = 0
    local_steps: int = 0
    tokens: int = 0
    loss_tokens: float = 0.0  # sum of (mean loss of an update * its tokens)
    contained: tuple[Range, ...] = ()
    dropped: tuple[Range, ...] = ()
