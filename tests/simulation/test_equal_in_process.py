"""A simulated run that trains equals the in-process driver fed the same events, bit for bit."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch

from halos.core.messages import DeadlineReached, Event, LocalStepsDone, NodeId, Received, Told
from halos.core.server import Server
from halos.core.state import TorchState
from halos.runtime.dispatcher import RoundEnds, Step
from halos.runtime.inprocess import InProcess, _RoundDone
from halos.simulation.environment import Environment, EnvironmentRegion
from halos.simulation.laboratory import Laboratory, specification_of
from halos.simulation.methods import Method, method_of
from halos.simulation.through_servers import ServersRun
from halos.simulation.world import Experiment, World

Key = tuple[NodeId, ...]
LOCAL_STEPS = 60


def key_of(node: NodeId, event: Event) -> Key:
    """What of one node is handled in the order in which it came about, whoever drives."""
    match event:
        case Received(sender, message):
            return node, "message", sender, type(message).__name__
        case Told(notice):
            return node, "notice", type(notice).__name__
        case _:
            return node, type(event).__name__


class InOrder(InProcess):
    """The in-process driver, handling what is there in the order that it is told."""

    def follow(self, order: list[Key]) -> None:
        waiting: dict[Key, deque[Event]] = {}
        for key in order:
            while not waiting.get(key):
                name, item = self._inbox.get(timeout=60)
                event = item.result if isinstance(item, _RoundDone) else item
                waiting.setdefault(key_of(name, event), deque()).append(event)
            event = waiting[key].popleft()
            if isinstance(event, LocalStepsDone):
                self._compute[key[0]].job = None
            self.dispatch(key[0], event, self.now)


def environment() -> Environment:
    return Environment(
        name="small",
        step_ms=100,
        model_bytes=40_000_000,
        root_region="us",
        regions=(
            EnvironmentRegion(name="us", workers=(1.0, 0.4)),
            EnvironmentRegion(name="eu", workers=(0.7,)),
        ),
        bandwidth_gbps=((10.0, 0.5), (0.5, 10.0)),
    )


def world(method: Method) -> World:
    specification = specification_of(environment(), None, seed=3, local_steps=LOCAL_STEPS)
    evaluation = specification.evaluation.model_copy(update={"batches": 1})
    specification = specification.model_copy(update={"evaluation": evaluation})
    experiment = Experiment(environment(), method, 3, specification, local_steps=LOCAL_STEPS)
    return World(experiment, Laboratory.of(specification))


@pytest.mark.parametrize("text", ["paper:k=2", "halos:k=3:in_flight=carry:alpha=0.5"])
def test_equal_to_the_in_process_driver(text: str) -> None:
    torch.set_num_threads(1)
    simulated = ServersRun(world(method_of(text)), method_of(text).settings)
    order: list[Key] = []

    def note(step: Step) -> None:
        assert not isinstance(step.event, DeadlineReached)
        order.append(key_of(step.node, step.event))

    simulated.clock.observers.append(note)
    assert simulated.run().finished

    other = ServersRun(world(method_of(text)), method_of(text).settings)
    trainers = {name: trainer.run for name, trainer in other.trainers.items()}
    driver = InOrder(other.clock.nodes, trainers)
    driver.start()
    driver.follow(order)
    driver.close()

    assert driver.finished
    unfinished = {
        pending.node: pending.event.job.lease.id
        for pending in driver.under_way()
        if isinstance(pending.event, RoundEnds)
    }
    for name, node in simulated.clock.nodes.items():
        if isinstance(node, Server):
            assert_same(node, driver.nodes[name])
    for name, trainer in simulated.trainers.items():
        mine = trainer.capture(before=None)  # what is under way at the end was not begun here
        theirs = other.trainers[name].capture(before=unfinished.get(name))
        assert all(mine[part].equal(theirs[part]) for part in mine)


def assert_same(mine: Server, theirs: object) -> None:
    assert isinstance(theirs, Server)
    assert replace(mine.state.reported, loss_tokens=0) == replace(
        theirs.state.reported, loss_tokens=0
    )
    assert isinstance(mine.tensors, TorchState) and isinstance(theirs.tensors, TorchState)
    here, there = mine.tensors.capture(), theirs.tensors.capture()
    assert here.keys() == there.keys()
    for part in here:
        for a, b in zip(here[part].tensors, there[part].tensors, strict=True):
            assert a.equal(b), f"{mine.name}: {part}"
