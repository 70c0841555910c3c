"""From a specification to what each role of a run needs.

The coordinator needs :func:`prepare_model` (first parameters, constants, layout) and the data's
identity; a worker needs both; a server below the root needs neither: the settings follow from the
specification, and the rest it is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments, ModelLayout
from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity
from halos.core.messages import NodeId
from halos.core.server import ServerSettings
from halos.core.state import Roundings
from halos.core.topology import ROOT
from halos.errors import UserError
from halos.specification import RunSpecification
from halos.training.borrowed import BorrowedOptimizer
from halos.training.constants import warn_of_running_averages
from halos.training.corpus import Progress
from halos.training.data import Dataset, SampleOrder, open_dataset
from halos.training.inner import LocalTrainer
from halos.training.model import ModelSettings, build_model
from halos.training.parameters import gather, layout_of
from halos.training.replica import Replica
from halos.wire.chunks import arrives

NO_DATA_HERE = (
    '[data] dataset: is "own", which only a training loop of your own has; join the run from it, '
    "or name data that halos can read"
)
NO_EVALUATION = 'no evaluation while training: only the training loops have its data ("own")'


@dataclass(frozen=True)
class PreparedModel:
    """The model as every run of this specification begins, on the CPU.

    ``settings`` have nothing left open.
    """

    settings: ModelSettings
    module: nn.Module
    layout: ModelLayout

    def start(self) -> Fragments:
        """Its parameters, a function of the seed."""
        return gather(self.module, self.layout)


@dataclass(frozen=True)
class PreparedData:
    """What samples there are. ``name`` is what machines compare, and what leases carry.

    ``samples`` in an epoch; ``sequence_length`` in tokens. ``dataset`` is ``None`` when the loop
    that trains brings its own; then there is :data:`NO_EVALUATION`.
    """

    name: str
    samples: int
    sequence_length: int
    order: SampleOrder
    dataset: Dataset | None


@dataclass(frozen=True)
class Prepared:
    """All that follows from a specification on one machine."""

    specification: RunSpecification
    dataset: Dataset
    order: SampleOrder
    model: ModelSettings
    layout: ModelLayout
    start: Fragments  # parameters at the start of the run, a function of the seed
    identity: Identity

    @property
    def total_samples(self) -> int:
        return self.specification.total_samples(self.dataset.samples)

    def server_settings(self) -> ServerSettings:
        """The same for every server; the root has no use for some of it."""
        return server_settings(self.specification)

    def outer_settings(self, server: NodeId) -> OuterSettings:
        return outer_settings(self.specification, server)

    def trainer(self) -> LocalTrainer:
        """A new worker's replica and inner optimizer."""
        specification = self.specification
        return LocalTrainer(
            build_model(self.model, specification.run.seed),
            self.layout,
            self.dataset,
            self.order,
            specification.inner_for(self.dataset.samples),
            specification.global_batch,
        )


def prepare(specification: RunSpecification, progress: Progress | None = None) -> Prepared:
    """For a whole run in this process. Raises ``UserError``; ``progress`` hears of long work."""
    data, model = prepare_data(specification, progress), prepare_model(specification)
    if data.dataset is None:
        raise UserError(NO_DATA_HERE)
    return Prepared(
        specification=specification,
        dataset=data.dataset,
        order=data.order,
        model=model.settings,
        layout=model.layout,
        start=model.start(),
        identity=identity_of(specification, model.layout, data.name),
    )


def prepare_model(specification: RunSpecification) -> PreparedModel:
    """Build the model. Reads no data. Raises ``UserError``."""
    data = specification.data
    if data.own:
        _check_own(specification)
    settings = specification.model.for_data(data.vocab_size, data.sequence_length)
    module = build_model(settings, specification.run.seed)
    return PreparedModel(settings, module, layout_of(module))


def prepare_data(specification: RunSpecification, progress: Progress | None = None) -> PreparedData:
    """Open the data, and hash it once. Raises ``UserError``; ``progress`` hears of long work."""
    settings = specification.data
    if settings.own:
        assert settings.samples is not None
        name, dataset, samples = f"{settings.name}/{settings.samples}", None, settings.samples
    else:
        dataset = open_dataset(settings, progress)
        # Where samples begin and end depends on their length as well.
        name = f"{dataset.name}@{dataset.content_hash[:16]}/{dataset.sequence_length}"
        samples = dataset.samples
    order = SampleOrder(specification.run.seed, samples)
    return PreparedData(name, samples, settings.sequence_length, order, dataset)


def specification_here(text: str, data: Path | None = None) -> RunSpecification:
    """The run's specification as a server sends it, with its token files as this machine has them.

    They are looked for in the folder ``data``, under as much of their path on the coordinator's
    machine as is found there; without ``data`` under the whole path. Raises ``UserError``.
    """
    specification = RunSpecification.model_validate_json(text)
    settings = specification.data
    if settings.train is None or settings.validation is None:
        if data is not None:
            raise UserError(f"--data {data}: is not needed, for this run has no token files")
        return specification
    train = _found(settings.train, "train", data)
    validation = _found(settings.validation, "validation", data)
    if train == validation:
        raise UserError(
            f"--data {data}: has one file {train} for both {settings.train} and "
            f"{settings.validation}; keep them in their folders below it"
        )
    here = settings.model_copy(update={"train": train, "validation": validation})
    return specification.model_copy(update={"data": here})


def _found(there: Path, field: str, data: Path | None) -> Path:
    names = there.relative_to(there.anchor).parts
    beneath = [data.joinpath(*names[start:]) for start in range(len(names))] if data else [there]
    for path in beneath:
        if path.is_file():
            return path.resolve()
    if data is not None:
        raise UserError(f"--data {data}: has no file {there.name}, the run's [data] {field}")
    raise UserError(
        f"[data] {field}: there is no file {there} on this machine; copy the run's token files "
        "here, and name their folder with --data (data in halos.join)"
    )


def _check_own(specification: RunSpecification) -> None:
    """Of data that halos does not read, a language model made here has to be told the sizes."""
    model, data = specification.model, specification.data
    vocabulary = model.vocab_size or model.config.get("vocab_size")
    if model.kind != "factory" and not vocabulary and "vocab_size" not in data.model_fields_set:
        raise UserError(
            '[data] vocab_size: is missing, and with dataset = "own" the model needs it'
        )
    if model.kind == "gpt" and model.context is None and data.sequence_length == 1:
        raise UserError(
            '[data] sequence_length: is missing, and with dataset = "own" the model needs it'
        )


def identity_of(specification: RunSpecification, layout: ModelLayout, data_name: str) -> Identity:
    """What two machines of one run have in common; ``data_name`` is :attr:`PreparedData.name`."""
    return Identity(run=specification.run.name, model=layout.hash, datasets=(data_name,))


def server_settings(specification: RunSpecification) -> ServerSettings:
    """Of every server, from the specification alone; the root has no use for some of it."""
    sync = specification.resolved_sync
    return ServerSettings(
        leasing=LeasingSettings(
            batch_size=specification.training.batch_size,
            local_steps=sync.local_steps,
            local_steps_of=specification.topology.local_steps(sync.local_steps),
            lease_horizon_s=specification.training.lease_horizon_s,
            lease_block=specification.training.lease_block,
        ),
        accumulation=sync.accumulation,
        merge_weight=sync.merge_weight,
        in_flight=sync.in_flight,
        drain_timeout_s=specification.membership.drain_timeout_s,
    )


def outer_settings(specification: RunSpecification, server: NodeId) -> OuterSettings:
    """Of one server, from the specification alone."""
    sync = specification.resolved_sync
    return sync.root if server == ROOT else sync.local


def roundings_of(specification: RunSpecification) -> Roundings:
    """What its links between servers do to numbers, as far as servers make up for it."""
    wire = specification.resolved_wire
    up, (down, differences) = wire.up, wire.down
    return Roundings(
        push=partial(arrives, codec=up.codec) if up.feedback else None,
        difference=partial(arrives, codec=down) if differences else None,
    )


def replica_of(
    specification: RunSpecification,
    data: PreparedData,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Replica:
    """A worker's replica of ``module``, which stays where it is.

    Without ``optimizer``, the specification's own AdamW. Raises ``UserError``.
    """
    warn_of_running_averages(module)
    return Replica(
        module,
        layout_of(module),
        specification.inner_for(data.samples),
        global_batch=specification.global_batch,
        tokens_a_sample=data.sequence_length,
        optimizer=None if optimizer is None else BorrowedOptimizer(optimizer, module),
    )
