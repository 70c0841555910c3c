"""What changes in an environment while a run goes on, as its TOML file says.

``who`` is a worker ("eu/1"), or a region ("eu"): its server, or its link to the root. Patterns
stand for several: "eu/*" is every worker of a region, "*/*" every worker, "*" every region.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from halos.core.settings import Settings

FaultKind = Literal["kill", "return", "join", "leave", "cut", "mend"]
Seconds = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]


def named(who: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that ``who`` stands for; a region's pattern stands for no worker."""
    return [
        name
        for name in names
        if name == who or (name.count("/") == who.count("/") and fnmatchcase(name, who))
    ]


class Variation(Settings):
    """Workers whose speed changes. Several that name the same worker hold together.

    ``schedule``: from ``at_s`` on, speed is multiplied by ``factor``, for each of ``[at_s,
    factor]`` in ascending order; before the first by 1. ``sigma``: each round's speed is multiplied
    by a log-normal number of that spread, whose median is 1.
    """

    who: str
    schedule: tuple[tuple[Seconds, Factor], ...] = ()
    sigma: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        times = [at_s for at_s, _ in self.schedule]
        for before, after in pairwise(times):
            if after <= before:
                raise ValueError(
                    f"schedule: {after:g} comes after {before:g}; give ascending times"
                )
        return self


class Happening(Settings):
    """Something that happens once, at a given time.

    A process that is ``kill``-ed is away until it is to ``return``; a worker may also ``leave``,
    telling its server, and ``join``: before its first time it is not there. A link is ``cut`` until
    ``mend``. What has happened already (killed twice) happens no second time, and what ends is over
    (killed twice, returned once).
    """

    at_s: float = Field(ge=0)
    kind: FaultKind
    who: str


class Outage(Settings):
    """What fails again and again, each that ``who`` stands for by itself.

    After ``every_s`` (mean, exponential) of being well it is away for ``lasting_s``: in the mean
    (exponential), or exactly so if ``fixed``.
    """

    kind: Literal["kill", "cut"]
    who: str
    every_s: float = Field(ge=1)
    lasting_s: float = Field(ge=1)
    fixed: bool = False
