"""Hardware and networks as the virtual clock models them, read from TOML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from halos.core.messages import NodeId
from halos.core.settings import Settings
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.errors import UserError
from halos.reading import read_settings
from halos.simulation.circumstances import Happening, Outage, Variation, named
from halos.simulation.modelled_time import EnvironmentModel

__all__ = ["Environment", "EnvironmentModel", "EnvironmentRegion", "shipped"]

SHIPPED = resources.files("halos.simulation") / "environments"
LISTED = 8  # names that a message lists at most


def one_speed_each(workers: Any) -> Any:
    """A number of workers stands for as many of equal speed."""
    if type(workers) is int and workers >= 0:
        return (1.0,) * workers
    return workers


def a_site_name(name: str) -> str:
    if name == ROOT or not name.strip() or set(name) & set("/.*?[]"):
        raise ValueError(
            f'"{name}" is not allowed; give a name without any of / . * ? [ ], other than {ROOT}'
        )
    return name


def _shape(matrix: Any) -> str:
    return "matrix" if isinstance(matrix, list | tuple) else "number"


Positive = Annotated[float, Field(gt=0)]
Matrix = tuple[tuple[float, ...], ...]
Bandwidths = tuple[tuple[Positive, ...], ...]
NotNegative = Annotated[float, Field(ge=0)]
Latency = Annotated[
    Annotated[NotNegative, Tag("number")]
    | Annotated[tuple[tuple[NotNegative, ...], ...], Tag("matrix")],
    Discriminator(_shape),
]


class EnvironmentRegion(Settings):
    """``workers``: relative speed of each; only ratios matter. Or how many, all alike."""

    name: Annotated[str, AfterValidator(a_site_name)]
    workers: Annotated[tuple[Positive, ...], BeforeValidator(one_speed_each)]


class Environment(Settings):
    """Regions, speeds, bandwidths, and what changes and fails on the way.

    Transfer time is ``bytes * 8 / bandwidth`` plus latency. ``bandwidth_gbps[a][b]`` in Gbit/s, the
    diagonal inside a region; ``None`` takes no time. ``one_way_ms`` (``latency_ms`` in the file): a
    number between all regions, or such a matrix. ``round_trips``: how often what is to be sent from
    region to region is announced and asked for before it flows. ``model_bytes`` is what one model
    or update weighs on every link. The last three: see ``circumstances.py``.
    """

    name: str
    description: str = ""
    step_ms: float = Field(gt=0, le=1e9)  # one local step at speed 1.0, the fastest worker's
    model_bytes: int = Field(default=0, ge=0, le=10**15)
    root_region: str
    regions: tuple[EnvironmentRegion, ...] = Field(min_length=1)
    bandwidth_gbps: Bandwidths | None = None
    one_way_ms: Latency = Field(default=0.0, alias="latency_ms")
    round_trips: float = Field(default=0.0, ge=0)
    variations: tuple[Variation, ...] = ()
    events: tuple[Happening, ...] = ()
    outages: tuple[Outage, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [region.name for region in self.regions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'regions: "{name}" is there twice; give each a name of its own')
        if self.root_region not in names:
            raise ValueError(
                f'root_region: "{self.root_region}" is no region; {_hint(self.root_region, names)}'
            )
        if not any(region.workers for region in self.regions):
            raise ValueError("regions: none has a worker; give one of them at least one")
        _check_square("bandwidth_gbps", self.bandwidth_gbps, len(names))
        _check_square("latency_ms", self.one_way_ms, len(names))
        for index, variation in enumerate(self.variations):
            _check_named("variations", index, variation.who, self.workers)
        for index, event in enumerate(self.events):
            _check_named("events", index, event.who, self.places(event.kind))
        for index, outage in enumerate(self.outages):
            _check_named("outages", index, outage.who, self.places(outage.kind))
        return self

    @classmethod
    def load(cls, name_or_path: str) -> Environment:
        """A named environment that ships with halos, or the path of a TOML file.

        Raises :class:`UserError`.
        """
        shipped, path = SHIPPED / f"{name_or_path}.toml", Path(name_or_path)
        if name_or_path in _shipped_names():
            with resources.as_file(shipped) as file:
                return read_settings(file, cls)
        if path.is_file():
            return read_settings(path, cls)
        raise UserError(
            f"environment {name_or_path}: is neither a file nor an environment that ships with "
            f"halos; {_hint(name_or_path, _shipped_names())}"
        )

    @property
    def latency_ms(self) -> float:
        """One way, between the two regions that are farthest from each other."""
        if isinstance(self.one_way_ms, tuple):
            return max(chain.from_iterable(self.one_way_ms))
        return self.one_way_ms

    @property
    def has_faults(self) -> bool:
        """Whether anything fails, joins or leaves: servers notice by heartbeats alone."""
        return bool(self.events or self.outages)

    @property
    def workers(self) -> list[NodeId]:
        return [f"{region.name}/{i}" for region in self.regions for i in range(len(region.workers))]

    def places(self, kind: str) -> list[NodeId]:
        """To what a fault of this kind can happen; a link is named after its lower end."""
        if kind in ("join", "leave"):
            return self.workers
        linked = [
            r.name for r in self.regions if kind in ("kill", "return") or not self._is_home(r)
        ]
        return linked + self.workers

    def _is_home(self, region: EnvironmentRegion) -> bool:
        return region.name == self.root_region

    def tree(self) -> Topology:
        """One local server a region under the root: what HALoS runs."""
        servers = [ServerPlace(ROOT, None)]
        servers += [ServerPlace(region.name, ROOT) for region in self.regions]
        workers = [
            WorkerPlace(f"{region.name}/{i}", region.name, speed)
            for region in self.regions
            for i, speed in enumerate(region.workers)
        ]
        return Topology(tuple(servers), tuple(workers))

    def star(self) -> Topology:
        """All workers attached to the root: asynchronous local SGD."""
        workers = [WorkerPlace(w.name, ROOT, w.speed) for w in self.tree().workers]
        return Topology((ServerPlace(ROOT, None),), tuple(workers))

    def latency_s(self, here: int, there: int) -> float:
        """One way, from one region to another; within one it is 0 unless a matrix says so."""
        if isinstance(self.one_way_ms, tuple):
            return self.one_way_ms[here][there] / 1e3
        return self.one_way_ms / 1e3 if here != there else 0.0

    def model_of(self, topology: Topology, seed: int = 0) -> EnvironmentModel:
        return EnvironmentModel(self, topology, seed=seed)


def shipped() -> dict[str, str]:
    """The environments that come with halos, and what each is, in a line."""
    documents = {name: (SHIPPED / f"{name}.toml").read_text("utf-8") for name in _shipped_names()}
    return {name: tomllib.loads(text)["description"] for name, text in documents.items()}


def _shipped_names() -> list[str]:
    files = (Path(entry.name) for entry in SHIPPED.iterdir())
    return sorted(file.stem for file in files if file.suffix == ".toml")


def _check_square(field: str, matrix: Matrix | float | None, size: int) -> None:
    if isinstance(matrix, tuple) and any(len(row) != size for row in (matrix, *matrix)):
        lengths = sorted({len(row) for row in matrix})
        raise ValueError(
            f"{field}: a matrix of {len(matrix)} by {' or '.join(map(str, lengths))} is not "
            f"allowed; give {size} rows of {size} numbers, one for each region"
        )


def _check_named(table: str, index: int, who: str, names: Sequence[str]) -> None:
    if not named(who, names):
        raise ValueError(
            f'[[{table}]] number {index + 1} who: "{who}" is nobody to whom this can happen; '
            f"{_hint(who, names)}"
        )


def _hint(word: str, names: Sequence[str]) -> str:
    if close := difflib.get_close_matches(word, names, n=1):
        return f"did you mean {close[0]}?"
    more = ", ..." if len(names) > LISTED else ""
    return f"there are {', '.join(names[:LISTED])}{more}"
