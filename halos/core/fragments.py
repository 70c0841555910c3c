"""A model as a list of flat fragments, and the layout that says what lies where.

All parameters, tied ones once, are laid end to end in fp32 and cut into fragments of at most
16 MiB, whatever the parallel plan (DESIGN 6).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from torch import Tensor

FRAGMENT_ELEMENTS = 16 * 2**20 // 4


class Fragments:
    """A payload of flat fp32 tensors, one a fragment. Nobody writes to them once they are here."""

    __slots__ = ("__weakref__", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def copy(self) -> Fragments:
        return Fragments([t.clone() for t in self.tensors])


@dataclass(frozen=True)
class Parameter:
    """One logical parameter. ``names`` has more than one entry when it is tied."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str  # as in torch, without the prefix: "float32"

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ModelLayout:
    """Names, shapes, types and order of a model's logical parameters."""

    parameters: tuple[Parameter, ...]

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter in the flat model."""
        return tuple(accumulate((p.numel for p in self.parameters), initial=0))[:-1]

    @cached_property
    def fragments(self) -> tuple[tuple[int, int], ...]:
        """Half-open element ranges of the flat model, one a fragment."""
        return tuple(
            (start, min(start + FRAGMENT_ELEMENTS, self.numel))
            for start in range(0, self.numel, FRAGMENT_ELEMENTS)
        )

    @cached_property
    def hash(self) -> str:
        """Equal for equal layouts; what machines compare when they join."""
        text = json.dumps([asdict(p) for p in self.parameters], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
