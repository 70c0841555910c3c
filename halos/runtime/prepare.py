"""From a specification to what a run needs: data, model, and the plan of its nodes."""

from __future__ import annotations

from dataclasses import dataclass

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments, ModelLayout
from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity
from halos.core.messages import NodeId
from halos.core.server import ServerSettings
from halos.core.topology import ROOT
from halos.specification import RunSpecification
from halos.training.corpus import Progress
from halos.training.data import Dataset, SampleOrder, open_dataset
from halos.training.inner import LocalTrainer
from halos.training.model import ModelSettings, build_model
from halos.training.parameters import gather, layout_of


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
        specification, sync = self.specification, self.specification.resolved_sync
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

    def outer_settings(self, server: NodeId) -> OuterSettings:
        sync = self.specification.resolved_sync
        return sync.root if server == ROOT else sync.local

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
    """Open the data and build the model. Raises ``UserError``; ``progress`` hears of long work."""
    dataset = open_dataset(specification.data, progress)
    model = specification.model.for_data(dataset.vocab_size, dataset.sequence_length)
    module = build_model(model, specification.run.seed)
    layout = layout_of(module)
    return Prepared(
        specification=specification,
        dataset=dataset,
        order=SampleOrder(specification.run.seed, dataset.samples),
        model=model,
        layout=layout,
        start=gather(module, layout),
        identity=Identity(
            run=specification.run.name,
            model=layout.hash,
            # Where samples begin and end depends on their length as well.
            datasets=(f"{dataset.name}@{dataset.content_hash[:16]}/{dataset.sequence_length}",),
        ),
    )
