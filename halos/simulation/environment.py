"""Hardware and networks as the virtual clock models them, read from TOML."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from halos.core.messages import Message, NodeId
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

    def model_of(self, topology: Topology) -> EnvironmentModel:
        return EnvironmentModel(self, topology)


class EnvironmentModel(UniformTime):
    """How long things take in an environment, for the nodes of one topology."""

    def __init__(self, environment: Environment, topology: Topology) -> None:
        super().__init__(topology, step_s=environment.step_ms / 1e3)
        self._environment = environment
        region = {r.name: i for i, r in enumerate(environment.regions)}
        root = region[environment.root_region]
        self._site: dict[NodeId, int] = {ROOT: root}
        for server in topology.servers[1:]:
            self._site[server.name] = region.get(server.name, root)
        for worker in topology.workers:
            home = worker.name.rpartition("/")[0]
            self._site[worker.name] = region.get(home, self._site.get(worker.parent, root))
        self._bulk_s = self._transfer_table(environment)

    def transfer_s(self, sender: NodeId, to: NodeId, message: Message) -> float:
        """From one process to another; between the nodes of one process it takes no time."""
        a, b = _process(sender), _process(to)
        if a == b:
            return 0.0
        here, there = self._site[a], self._site[b]
        latency = self._environment.latency_ms / 1e3 if here != there else 0.0
        if getattr(message, "payload", None) is None:
            return latency
        return latency + self._bulk_s[here][there]

    @staticmethod
    def _transfer_table(environment: Environment) -> list[list[float]]:
        count = len(environment.regions)
        rates = environment.bandwidth_gbps
        if rates is None:
            return [[0.0] * count for _ in range(count)]
        bits = environment.model_bytes * 8
        return [[bits / (rate * 1e9) for rate in row] for row in rates]


def _process(node: NodeId) -> NodeId:
    """A session or membership lives in the process of its worker or server."""
    return node.partition(".")[0]
