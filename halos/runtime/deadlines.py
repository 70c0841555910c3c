"""How long a transfer may take: by its size and by what the link was measured to carry."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S = 30.0  # for anything, whatever its size
SLOWEST_BPS = 1e6  # taken for the link until something was measured
PATIENCE = 4.0  # a link may be this much slower than it was
SMOOTHING = 0.3
TELLING_BYTES = 256 * 1024  # smaller transfers say nothing of a link's rate


@dataclass
class Deadlines:
    """Measures one link. ``bits_per_s`` is a running mean, ``None`` before the first transfer."""

    bits_per_s: float | None = None

    def of(self, size_bytes: int) -> float:
        """Seconds that a transfer of this size is given."""
        rate = SLOWEST_BPS if self.bits_per_s is None else self.bits_per_s / PATIENCE
        return LEAST_S + 8 * size_bytes / max(1.0, rate)

    def took(self, size_bytes: int, seconds: float) -> None:
        """Note a transfer that ended well."""
        if size_bytes < TELLING_BYTES or seconds <= 0:
            return
        measured = 8 * size_bytes / seconds
        before = self.bits_per_s
        self.bits_per_s = measured if before is None else before + SMOOTHING * (measured - before)
