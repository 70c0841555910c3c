"""Real runs in this process whose workers train in loops of their own, through ``Run``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from halos.core.fragments import Fragments
from halos.core.ledger import Ledger
from halos.core.membership import MembershipSettings
from halos.core.messages import NodeId
from halos.core.server import Server
from halos.core.state import TorchState
from halos.core.topology import ROOT
from halos.run import Run
from halos.runtime.handover import Handover
from halos.runtime.inprocess import InProcess
from halos.runtime.plan import RunPlan
from halos.runtime.prepare import (
    identity_of,
    outer_settings,
    prepare_data,
    prepare_model,
    server_settings,
)
from halos.specification import RunSpecification

ALONE = MembershipSettings(heartbeat_interval_s=0)


@dataclass
class Joined:
    """A run's servers and drivers; each worker's job waits in a handover for a loop to do it."""

    specification: RunSpecification
    handovers: dict[NodeId, Handover] = field(init=False)
    driver: InProcess = field(init=False)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        specification = self.specification
        topology = specification.topology
        self.data, self.prepared = prepare_data(specification), prepare_model(specification)
        start = self.prepared.start()
        plan = RunPlan(
            topology=topology,
            identity=identity_of(specification, self.prepared.layout, self.data.name),
            membership=ALONE,
            samples={self.data.name: specification.total_samples(self.data.samples)},
            server_settings=lambda _: server_settings(specification),
            tensors=lambda name: TorchState.start(
                start, outer_settings(specification, name), has_parent=name != ROOT
            ),
        )
        self.handovers = {worker.name: Handover() for worker in topology.workers}
        self.driver = InProcess(plan.nodes(), dict(self.handovers))

    @property
    def root(self) -> Server:
        root = self.driver.nodes[ROOT]
        assert isinstance(root, Server)
        return root

    @property
    def model(self) -> Fragments:
        assert isinstance(self.root.tensors, TorchState)
        return self.root.tensors.publish()

    @property
    def ledger(self) -> Ledger:
        return self.root.state.leasing.ledger

    def join(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        worker: NodeId | None = None,
    ) -> Run:
        handover = self.handovers[worker or next(iter(self.handovers))]
        return Run.of(handover, self.specification, self.data, model, optimizer)

    def drive(self) -> None:
        self.driver.start()
        try:
            finished = self.driver.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self.error, finished = error, False
        for handover in self.handovers.values():
            handover.close(finished=finished)


@contextmanager
def joined(specification: RunSpecification) -> Iterator[Joined]:
    """The run drives itself until its end, or until the block is left."""
    run = Joined(specification)
    thread = threading.Thread(target=run.drive)
    thread.start()
    try:
        yield run
    finally:
        for handover in run.handovers.values():
            if not handover.closed:
                run.driver.stop()
                handover.close()
        thread.join()
        run.driver.close()
    if run.error is not None:
        raise run.error


def side_by_side(loops: list[Callable[[], None]]) -> None:
    """Each in a thread of its own. Raises what the first failed with."""
    errors: list[BaseException] = []

    def guarded(loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
