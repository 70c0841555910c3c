"""Hardware and networks as the virtual clock models them, read from TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from halos.core.membership import membership_of, session_of
from halos.core.messages import (
    Assignment,
    Message,
    NodeId,
    Push,
    PushAnswer,
    Resumed,
    WorkerUpdate,
)
from halos.core.settings import Settings
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.runtime.timing import UniformTime


class EnvironmentRegion(Settings):
    """``workers``: relative speed of each; only ratios matter."""

    name: str = Field(min_length=1)
    workers: tuple[float, ...]


class Environment(Settings):
    """Regions, speeds and bandwidths. Transfer time is ``bytes * 8 / bandwidth`` plus latency.

    ``bandwidth_gbps[a][b]`` in Gbit/s, the diagonal inside a region; ``None`` takes no time.
    ``model_bytes`` is what one model or update weighs on every link.
    """

    name: str
    description: str = ""
    step_ms: float = Field(gt=0)  # one local step at speed 1.0, the fastest worker's
    model_bytes: int = Field(default=0, ge=0)
    root_region: str
    regions: tuple[EnvironmentRegion, ...] = Field(min_length=1)
    bandwidth_gbps: tuple[tuple[float, ...], ...] | None = None
    latency_ms: float = Field(default=0.0, ge=0)  # one way, between regions

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [region.name for region in self.regions]
        if len(set(names)) != len(names):
            raise ValueError("two regions have the same name")
        if self.root_region not in names:
            raise ValueError(f"root_region {self.root_region!r} is not one of {', '.join(names)}")
        if not any(region.workers for region in self.regions):
            raise ValueError("at least one region needs a worker")
        if any(speed <= 0 for region in self.regions for speed in region.workers):
            raise ValueError("a worker's speed must be above 0")
        rows = self.bandwidth_gbps
        if rows is not None:
            if len(rows) != len(names) or any(len(row) != len(names) for row in rows):
                raise ValueError(
                    f"bandwidth_gbps must be {len(names)} rows of {len(names)} numbers"
                )
            if any(rate <= 0 for row in rows for rate in row):
                raise ValueError("a bandwidth must be above 0")
        return self

    @classmethod
    def load(cls, name_or_path: str) -> Environment:
        """A named environment that ships with halos, or the path of a TOML file."""
        shipped = resources.files("halos.simulation") / "environments" / f"{name_or_path}.toml"
        text = shipped.read_text() if shipped.is_file() else Path(name_or_path).read_text()
        return cls.model_validate(tomllib.loads(text))

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

    def latencies_s(self) -> list[list[float]]:
        """One way, from each region to each."""
        regions = range(len(self.regions))
        return [[self.latency_ms / 1e3 if a != b else 0.0 for b in regions] for a in regions]

    def model_of(self, topology: Topology) -> EnvironmentModel:
        return EnvironmentModel(self, topology)


class EnvironmentModel(UniformTime):
    """How long things take in an environment, for the nodes of one topology.

    ``up_ratio`` and ``down_ratio``: what pushes and the models that answer them weigh, as shares of
    a model; a link that compresses has less than 1. A model sent whole after a reset weighs 1.
    """

    def __init__(
        self,
        environment: Environment,
        topology: Topology,
        *,
        up_ratio: float = 1.0,
        down_ratio: float = 1.0,
    ) -> None:
        super().__init__(topology, step_s=environment.step_ms / 1e3)
        self._site = _sites(environment, topology)
        self._small_s = environment.latencies_s()
        whole, up, down = (Bulk.of(environment, ratio) for ratio in (1.0, up_ratio, down_ratio))
        self._whole = whole
        self._bulk: dict[type, Bulk] = {
            WorkerUpdate: whole,
            Assignment: whole,
            Push: up,
            PushAnswer: down,
            Resumed: down,
        }

    def transfer_s(self, sender: NodeId, to: NodeId, message: Message) -> float:
        """From one process to another, in seconds."""
        here, there = self._site[sender], self._site[to]
        bulk = self._bulk_of(message)
        return self._small_s[here][there] if bulk is None else bulk.seconds[here][there]

    def size_bytes(self, sender: NodeId, to: NodeId, message: Message) -> int:
        """What a message weighs on the links between sites: 0 within one, or without a payload."""
        bulk = self._bulk_of(message)
        return 0 if bulk is None or self._site[sender] == self._site[to] else bulk.bytes

    def _bulk_of(self, message: Message) -> Bulk | None:
        bulk = self._bulk.get(type(message))
        if bulk is not None and type(message) is Resumed:
            if message.payload is None:
                return None
            return self._whole if message.reset else bulk
        return bulk


@dataclass(frozen=True, slots=True)
class Bulk:
    """A kind of payload: its weight, and the seconds it takes from each site to each."""

    bytes: int
    seconds: list[list[float]]

    @classmethod
    def of(cls, environment: Environment, ratio: float) -> Bulk:
        latencies, rates = environment.latencies_s(), environment.bandwidth_gbps
        size = round(environment.model_bytes * ratio)
        if rates is None:
            return cls(size, latencies)
        seconds = [
            [latency + size * 8 / (rate * 1e9) for latency, rate in zip(*rows, strict=True)]
            for rows in zip(latencies, rates, strict=True)
        ]
        return cls(size, seconds)


def _sites(environment: Environment, topology: Topology) -> dict[NodeId, int]:
    """The region that each node is in: what is not named after one is where its parent is."""
    region = {r.name: i for i, r in enumerate(environment.regions)}
    site: dict[NodeId, int] = {ROOT: region[environment.root_region]}
    places: tuple[ServerPlace | WorkerPlace, ...] = (*topology.servers[1:], *topology.workers)
    for place in places:
        home = place.name.rpartition("/")[0] or place.name
        assert place.parent is not None
        site[place.name] = region[home] if home in region else site[place.parent]
    # A session or membership is in the process of its worker or server.
    return {node: here for name, here in site.items() for node in nodes_of(name)}


def nodes_of(process: NodeId) -> tuple[NodeId, NodeId, NodeId]:
    return process, session_of(process), membership_of(process)
