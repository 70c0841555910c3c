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
from itertools import accumulate, chain
from math import prod

import torch
from torch import Tensor

from halos.core.tensors import FRAGMENT_ELEMENTS


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
    """Names, shapes, types and order of a model's logical parameters.

    ``constants`` (frozen parameters, buffers) are of the same values on every machine: they are no
    part of what travels each round.
    """

    parameters: tuple[Parameter, ...]
    constants: tuple[Parameter, ...] = ()

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
        parts = [[asdict(p) for p in group] for group in (self.parameters, self.constants)]
        text = json.dumps(parts if self.constants else parts[0], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def zeros(layout: ModelLayout) -> Fragments:
    """In the place of a model that is still to come."""
    return Fragments([torch.zeros(end - start) for start, end in layout.fragments])


def first_difference(mine: ModelLayout, theirs: ModelLayout) -> str | None:
    """The first parameter or constant in which two layouts differ, as a part of a sentence.

    Speaks of ``mine`` as here, of ``theirs`` as there. ``None`` if they are equal.
    """
    here, there = _by_name(mine), _by_name(theirs)
    for name in chain(here, there):
        if name not in there or name not in here:
            what = here.get(name) or there[name]
            places = "here but not there" if name in here else "there but not here"
            return f"{what.kind} {name} is {places}"
        if (difference := _difference(here[name], there[name])) is not None:
            return f"{here[name].kind} {name} {difference}"
    return None


@dataclass(frozen=True, slots=True)
class _Named:
    kind: str  # "parameter" or "constant"
    place: int
    parameter: Parameter


def _by_name(layout: ModelLayout) -> dict[str, _Named]:
    groups = (("parameter", layout.parameters), ("constant", layout.constants))
    return {
        name: _Named(kind, place, parameter)
        for kind, parameters in groups
        for place, parameter in enumerate(parameters, start=1)
        for name in parameter.names
    }


def _difference(here: _Named, there: _Named) -> str | None:
    mine, theirs = here.parameter, there.parameter
    if here.kind != there.kind:
        return f"is a {there.kind} there"
    if mine.shape != theirs.shape:
        return f"has shape {mine.shape} here and {theirs.shape} there"
    if mine.dtype != theirs.dtype:
        return f"is of type {mine.dtype} here and {theirs.dtype} there"
    if mine.names != theirs.names:
        tied = [", ".join(p.names) if len(p.names) > 1 else "untied" for p in (mine, theirs)]
        return f"is tied otherwise: {tied[0]} here, {tied[1]} there"
    if here.place != there.place:
        return f"comes as number {here.place} here and as number {there.place} there"
    return None
