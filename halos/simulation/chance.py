"""Chance without state: what is drawn depends on its key alone, whenever it is asked for."""

from __future__ import annotations

import math
import struct
from hashlib import blake2b

Key = str | int | float


def uniforms(*key: Key) -> tuple[float, float]:
    """Two independent draws from between 0 and 1, neither of them included."""
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    a, b = struct.unpack("<QQ", digest)
    return ((a >> 12) + 0.5) * 2.0**-52, ((b >> 12) + 0.5) * 2.0**-52


def normal(*key: Key) -> float:
    """A draw from the standard normal distribution (Box and Muller)."""
    a, b = uniforms(*key)
    return math.sqrt(-2.0 * math.log(a)) * math.cos(2.0 * math.pi * b)
