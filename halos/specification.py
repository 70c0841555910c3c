"""The specification of a run: one TOML file, and all that follows from it.

Each section is a settings class. Those of a part that exists elsewhere live beside it; the rest,
and what ties the sections together, is here. Relative paths start at the file's folder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from halos.core.equations import OuterSettings
from halos.core.membership import MembershipSettings
from halos.core.settings import Settings
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.reading import read_settings
from halos.training.data import DataSettings
from halos.training.model import ModelSettings
from halos.training.optimizer import InnerSettings
from halos.wire.link import LinkSettings
from halos.wire.settings import WireTable


def from_the_files_folder(path: Path, info: ValidationInfo) -> Path:
    folder = (info.context or {}).get("folder")
    return Path(folder, path.expanduser()) if folder is not None else path


def data_from_the_files_folder(data: DataSettings, info: ValidationInfo) -> DataSettings:
    files = {"train": data.train, "validation": data.validation}
    return data.model_copy(
        update={field: file and from_the_files_folder(file, info) for field, file in files.items()}
    )


def factory_from_the_files_folder(model: ModelSettings, info: ValidationInfo) -> ModelSettings:
    """A factory is looked for beside the specification, unless ``folder`` says where."""
    if model.factory is None:
        return model
    return model.model_copy(
        update={"folder": from_the_files_folder(model.folder or Path(), info).absolute()}
    )


def a_plain_name(name: str) -> str:
    if not name or name != name.strip() or not name.isprintable() or set(name) & set("/.\\"):
        raise ValueError(f'"{name}" is not allowed; give a name without dots and slashes')
    return name


def one_speed_each(workers: Any) -> Any:
    """A number of workers stands for as many of equal speed."""
    if isinstance(workers, bool) or not isinstance(workers, int):
        return workers
    if workers < 0:
        raise ValueError(f"{workers} is not allowed; give a whole number of at least 0")
    return (1.0,) * workers


FilePath = Annotated[Path, AfterValidator(from_the_files_folder)]
PlainName = Annotated[str, AfterValidator(a_plain_name)]
Workers = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...],
    BeforeValidator(one_speed_each, json_schema_input_type=int | list[float]),
]


class RunTable(Settings):
    """``directory`` holds checkpoints and results; by default ``runs/NAME`` beside the file."""

    name: PlainName = Field(description='the run a name, such as name = "first"')
    seed: int = Field(default=0, ge=0, lt=2**64)
    directory: FilePath = Path()

    @model_validator(mode="before")
    @classmethod
    def _named_directory(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("name"), str):
            return {"directory": Path("runs", given["name"]), **given}
        return given


class OuterTable(Settings):
    """An outer optimizer. What is left out comes from the preset.

    ``rate`` is applied to each child's change, as the paper quotes it. ``mean_rate`` in its place
    is the rate for the mean of all children's changes: each counts ``mean_rate / children``.
    """

    rate: float | None = Field(default=None, gt=0)
    mean_rate: float | None = Field(default=None, gt=0)
    momentum: float | None = Field(default=None, ge=0, lt=1)
    momentum_delay: int | None = Field(default=None, ge=1)
    momentum_share: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.rate is not None and self.mean_rate is not None:
            raise ValueError(
                f"mean_rate: {self.mean_rate:g} is given beside rate = {self.rate:g}; keep one of "
                "the two"
            )
        return self

    def over(self, preset: OuterTable) -> OuterTable:
        """With what is left out here as in ``preset``."""
        given = self.model_dump(exclude_none=True)
        rates = {"rate", "mean_rate"} if given.keys() & {"rate", "mean_rate"} else set()
        return OuterTable(**preset.model_dump(exclude_none=True, exclude=rates) | given)

    def among(self, children: float) -> OuterSettings:
        """At a server of so many children; a rate must be set."""
        given = self.model_dump(exclude_none=True, exclude={"mean_rate"})
        if self.mean_rate is not None:
            given["rate"] = self.mean_rate / children
        return OuterSettings(**given)


class SyncTable(Settings):
    """How often and how models meet. What is left out comes from the preset."""

    model_config = ConfigDict(serialize_by_alias=True)

    preset: Literal["fast", "paper", "single"] | None = None
    local_steps: int | None = Field(default=None, ge=1)
    accumulation: int | None = Field(default=None, ge=1)
    merge_weight: float | None = Field(default=None, gt=0, le=1)
    in_flight: Literal["drop", "carry"] | None = None
    local: OuterTable = OuterTable()
    root: OuterTable = Field(default=OuterTable(), alias="global")


class ResolvedSync(Settings):
    """A :class:`SyncTable` with nothing left open. ``local`` governs every server but the root."""

    local_steps: int
    accumulation: int
    merge_weight: float
    in_flight: Literal["drop", "carry"]
    local: OuterSettings
    root: OuterSettings


PRESETS: Mapping[str, SyncTable] = {
    # The best of a sweep on the environment paper-4x4 (see the README): no momentum, everybody's
    # mean change once and a half in his region and once at the root, nothing dropped.
    "fast": SyncTable.model_validate(
        {
            "local_steps": 8,
            "accumulation": 4,
            "merge_weight": 0.25,
            "in_flight": "carry",
            "local": {"mean_rate": 1.5},
            "global": {"mean_rate": 1.0},
        }
    ),
    # HALoS (arXiv 2506.04531), section 5.
    "paper": SyncTable.model_validate(
        {
            "local_steps": 8,
            "accumulation": 32,
            "merge_weight": 0.25,
            "in_flight": "drop",
            "local": {"rate": 0.2, "momentum": 0.9, "momentum_delay": 16},
            "global": {"rate": 0.15, "momentum": 0.5, "momentum_delay": 2},
        }
    ),
    # Nobody to average with: every round counts in full, and the run equals a plain local loop.
    "single": SyncTable.model_validate(
        {
            "local_steps": 8,
            "accumulation": 1,
            "merge_weight": 1.0,
            "in_flight": "carry",
            "local": {"rate": 1.0},
            "global": {"rate": 1.0},
        }
    ),
}


def preset_for(table: SyncTable, workers: int) -> str:
    """The preset named, or ``single`` for a run of one worker, or ``fast``."""
    return table.preset or ("single" if workers == 1 else "fast")


def resolve_sync(table: SyncTable, topology: Topology) -> ResolvedSync:
    """Fill what ``table`` leaves open from the preset, for the servers of ``topology``."""
    preset = PRESETS[preset_for(table, len(topology.workers))]
    tiers = {"local", "root"}
    filled = {
        name: value
        for whole in (preset, table)
        for name, value in whole.model_dump(exclude_none=True, exclude=tiers | {"preset"}).items()
    }
    children = children_of(topology)
    below = [count for name, count in children.items() if count and name != ROOT] or [1]
    return ResolvedSync(
        **filled,
        local=table.local.over(preset.local).among(sum(below) / len(below)),
        root=table.root.over(preset.root).among(children[ROOT]),
    )


def children_of(topology: Topology) -> Counter[str]:
    """How many children each server has, those below which there is no worker apart."""
    children = Counter(worker.parent for worker in topology.workers)
    for server in reversed(topology.servers):  # parents come before their children
        if server.parent is not None and children[server.name]:
            children[server.parent] += 1
    return children


class TrainingTable(Settings):
    """How much is trained. ``global_batch`` paces the learning rate: samples an iteration."""

    batch_size: int = Field(default=8, ge=1)  # samples a local step of one worker
    local_steps_total: int | None = Field(default=None, ge=1)  # of all workers together
    epochs: float | None = Field(default=None, gt=0)
    global_batch: int | None = Field(default=None, ge=1)
    lease_horizon_s: float = Field(default=30.0, gt=0)
    lease_block: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.local_steps_total is not None and self.epochs is not None:
            raise ValueError(
                f"epochs: {self.epochs:g} is given beside local_steps_total = "
                f"{self.local_steps_total}; keep one of the two"
            )
        return self


class RootTable(Settings):
    """Workers that belong to no region."""

    workers: Workers = ()


class LinkTable(Settings):
    """The network between a region and its parent, to be emulated; as in :class:`LinkSettings`.

    What a region leaves out comes from the run's table; what that leaves out is not emulated.
    """

    rate_mbps: float | None = Field(default=None, gt=0)
    rtt_ms: float | None = Field(default=None, ge=0)


class RegionTable(Settings):
    """A local parameter server and its workers. ``parent`` names the region above it, if any."""

    name: PlainName = Field(description='every region a name, such as name = "eu"')
    workers: Workers = ()
    parent: str | None = None
    link: LinkTable = LinkTable()


class MembershipTable(MembershipSettings):
    """When somebody silent is given up. A heartbeat interval of 0 switches heartbeats off."""

    drain_timeout_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _two_heartbeats_may_be_lost(self) -> Self:
        if self.heartbeat_timeout_s <= 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s: {self.heartbeat_timeout_s:g} is not allowed; give more than "
                f"twice heartbeat_interval_s, which is {self.heartbeat_interval_s:g}"
            )
        return self


WIRES: Mapping[str, WireTable] = {  # of the presets whose links are not exact
    "fast": WireTable(workers="bf16", uplink="int4+ef+zstd", downlink="int8-delta"),
}


class CheckpointTable(Settings):
    """How often the whole run is saved, and how many of these are kept."""

    every_s: float = Field(default=60.0, gt=0)
    keep: int = Field(default=3, ge=1)


class EvaluationTable(Settings):
    """How often the root's model is tried on ``batches`` of the validation set."""

    every_s: float = Field(default=15.0, gt=0)
    batches: int = Field(default=16, ge=1)


class RunSpecification(Settings):
    """Everything that a run is started with."""

    run: RunTable = Field(description='a section [run] with name = "..."')
    model: Annotated[ModelSettings, AfterValidator(factory_from_the_files_folder)] = ModelSettings(
        preset="0.1m"
    )
    data: Annotated[DataSettings, AfterValidator(data_from_the_files_folder)] = DataSettings()
    inner: InnerSettings = InnerSettings()
    sync: SyncTable = SyncTable()
    training: TrainingTable = TrainingTable()
    root: RootTable = RootTable()
    regions: tuple[RegionTable, ...] = ()
    link: LinkTable = LinkTable()
    membership: MembershipTable = MembershipTable()
    wire: WireTable = WireTable()
    checkpoint: CheckpointTable = CheckpointTable()
    evaluation: EvaluationTable = EvaluationTable()

    @model_validator(mode="after")
    def _a_tree(self) -> Self:
        parents: dict[str, str] = {}
        for region in self.regions:
            if region.name == ROOT or region.name in parents:
                raise ValueError(f'[[regions]] "{region.name}" name: is taken; give another')
            parents[region.name] = region.parent or ROOT
        for name, parent in parents.items():
            if parent != ROOT and parent not in parents:
                raise ValueError(
                    f'[[regions]] "{name}" parent: there is no region "{parent}"; give one of '
                    f"{', '.join(sorted(parents.keys() - {name})) or ROOT}"
                )
            if ROOT not in line_of(name, parents):
                raise ValueError(
                    f'[[regions]] "{name}" parent: "{parent}" is below "{name}"; a tree has no loop'
                )
        if not self.workers:
            raise ValueError("[[regions]] workers: there are none; give at least one worker")
        return self

    @property
    def topology(self) -> Topology:
        """The tree: the root first, a parent before its children; workers in the file's order."""
        parents = {region.name: region.parent or ROOT for region in self.regions}
        order = sorted(parents, key=lambda name: len(line_of(name, parents)))
        servers = [ServerPlace(ROOT, None), *(ServerPlace(name, parents[name]) for name in order)]
        return Topology(tuple(servers), self.workers)

    @property
    def workers(self) -> tuple[WorkerPlace, ...]:
        """All workers: the root's own, then each region's in the file's order."""
        speeds = {ROOT: self.root.workers} | {r.name: r.workers for r in self.regions}
        return tuple(
            WorkerPlace(f"{server}/{index}", server, speed)
            for server, of_each in speeds.items()
            for index, speed in enumerate(of_each)
        )

    def link_of(self, region: str) -> LinkSettings | None:
        """What to emulate between ``region`` and its parent; None: nothing, nor above the root."""
        own = next((one.link for one in self.regions if one.name == region), None)
        if own is None:
            return None
        given = self.link.model_dump(exclude_none=True) | own.model_dump(exclude_none=True)
        return LinkSettings.model_validate(given) if given else None

    @property
    def resolved_wire(self) -> WireTable:
        """With nothing left open: what is of none is exact."""
        preset = preset_for(self.sync, len(self.topology.workers))
        return self.wire.over(WIRES.get(preset, WireTable()))

    @property
    def resolved_sync(self) -> ResolvedSync:
        return resolve_sync(self.sync, self.topology)

    @property
    def global_batch(self) -> int:
        """Samples an iteration of the learning-rate schedule; by default a local step of all."""
        return self.training.global_batch or self.training.batch_size * len(self.workers)

    def total_samples(self, dataset_samples: int) -> int:
        """Samples that the whole run trains on, over a training set of ``dataset_samples``."""
        if self.training.local_steps_total is not None:
            return self.training.local_steps_total * self.training.batch_size
        epochs = 1.0 if self.training.epochs is None else self.training.epochs
        return max(1, round(epochs * dataset_samples))

    def iterations(self, dataset_samples: int) -> int:
        """Length of the learning-rate schedule."""
        return max(1, math.ceil(self.total_samples(dataset_samples) / self.global_batch))

    def inner_for(self, dataset_samples: int) -> InnerSettings:
        """``inner`` with the schedule as long as the run, where the user did not set its length.

        Raises ``UserError`` if the warm-up that the user set is longer than that.
        """
        return self.inner.for_run(self.iterations(dataset_samples))


def line_of(name: str, parents: Mapping[str, str]) -> list[str]:
    """``name`` and all above it; without the root when the line runs in a circle."""
    line = [name]
    while line[-1] in parents and parents[line[-1]] not in line:
        line.append(parents[line[-1]])
    return line


def load_specification(path: Path) -> RunSpecification:
    """Read and check a specification. Raises ``UserError``: one sentence that names the field."""
    return read_settings(path, RunSpecification)
