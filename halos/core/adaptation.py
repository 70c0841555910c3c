"""Decisions on how much each worker does, as pure functions of what is known of the hardware."""

from __future__ import annotations

import math


def local_steps_for(local_steps: int, speed: float, fastest: float) -> int:
    """``H_i = max(1, ceil(H * speed_i / fastest))``: rounds take about equally long (DESIGN 4).

    ``speed`` and ``fastest`` in any common unit of local steps a time.
    """
    return max(1, math.ceil(local_steps * (speed / fastest)))
