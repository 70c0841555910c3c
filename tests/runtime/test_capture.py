"""A run captured after any event, written out and read back, goes on as if nothing had been."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.messages import LocalStepsDone, NodeId, Push, RunLocalSteps, Send
from halos.core.server import Server, ServerSettings
from halos.core.state import EXACT, Roundings, TorchState
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.runtime.capture import Capture, Restored, capture
from halos.runtime.dispatcher import Step
from halos.runtime.plan import RunPlan
from halos.runtime.virtual import VirtualClock
from halos.simulation.environment import Environment, EnvironmentModel
from halos.wire.chunks import arrives
from halos.wire.frames import Codecs
from halos.wire.roundtrip import RoundTrip

OUTER = OuterSettings(rate=0.1, momentum=0.5, momentum_delay=2)
TREE = Topology(
    servers=tuple(
        ServerPlace(name, parent)
        for name, parent in ((ROOT, None), ("us", ROOT), ("eu", ROOT), ("rack", "eu"))
    ),
    workers=tuple(
        WorkerPlace(f"{server}/{i}", server, 1 / (i + 1))
        for server in ("us", "eu", "rack")
        for i in range(2)
    ),
)
LINKS = Environment.model_validate(
    {
        "name": "two regions",
        "step_ms": 10,
        "model_bytes": 1_000_000,
        "root_region": "us",
        "regions": [{"name": "us", "workers": [1]}, {"name": "eu", "workers": [1]}],
        "bandwidth_gbps": [[1.0, 0.1], [0.1, 1.0]],
    }
)


def trained(job: RunLocalSteps) -> LocalStepsDone:
    """A made-up change that depends on the samples and on where the round started."""
    assert isinstance(job.payload, Fragments)
    (theta,) = job.payload.tensors
    change = Fragments([theta * 0.1 + job.lease.ranges[0][0] * 1e-3])
    return LocalStepsDone(job.lease.id, job.local_steps, job.lease.samples, 1.0, 1.0, 0.0, change)


BF16 = partial(arrives, codec="bf16")
WAYS: dict[str, tuple[RoundTrip | None, Roundings]] = {
    "exact": (RoundTrip(), EXACT),
    "handed over": (None, EXACT),
    "rounded": (RoundTrip(Codecs(up="bf16", models="bf16")), EXACT),
    "made up for": (RoundTrip(Codecs(up="bf16", differences="bf16")), Roundings(BF16, BF16)),
}


def run_of(in_flight: str, way: str, saved: Capture | None = None) -> VirtualClock:
    isolate, links = WAYS[way]
    settings = ServerSettings.model_validate(
        {
            "leasing": LeasingSettings(
                batch_size=2, local_steps=4, local_steps_of=TREE.local_steps(4)
            ),
            "accumulation": 3,
            "in_flight": in_flight,
        }
    )
    restored = Restored(saved) if saved is not None else None

    def tensors(name: NodeId) -> TorchState:
        if restored is not None:
            return restored.server_tensors(name, OUTER, links)
        start = Fragments([torch.ones(5)])
        return TorchState.start(start, OUTER, links, has_parent=name != ROOT)

    plan = RunPlan(
        topology=TREE,
        identity=Identity(run="r", model="m", datasets=("d",)),
        membership=MembershipSettings(),
        samples={"d": 151},
        server_settings=lambda _: settings,
        tensors=tensors,
    )
    nodes = plan.nodes()
    if restored is not None:
        nodes = plan.nodes(restored.node_states(nodes))
    clock = VirtualClock(
        nodes,
        EnvironmentModel(LINKS, TREE),
        dict.fromkeys((w.name for w in TREE.workers), trained),
        isolate=isolate,
        now=saved.manifest["now"] if saved is not None else 0.0,
        sequence=saved.manifest["sequence"] if saved is not None else 0,
    )
    if restored is not None:
        clock.restore(restored.under_way())
    else:
        clock.start()
    return clock


def written(saved: Capture) -> Capture:
    """Through JSON, and with tensors of its own."""
    tensors = {key: tensor.clone() for key, tensor in saved.tensors.items()}
    return Capture(json.loads(json.dumps(saved.manifest)), tensors)


def assert_equal_end(one: VirtualClock, other: VirtualClock) -> None:
    assert one.now == other.now
    for server in TREE.servers:
        mine, theirs = one.nodes[server.name], other.nodes[server.name]
        assert isinstance(mine, Server)
        assert isinstance(theirs, Server)
        assert mine.state == theirs.state
        assert isinstance(mine.tensors, TorchState)
        assert isinstance(theirs.tensors, TorchState)
        parts = theirs.tensors.capture()
        assert mine.tensors.capture().keys() == parts.keys()
        for name, fragments in mine.tensors.capture().items():
            assert all(map(torch.equal, fragments.tensors, parts[name].tensors)), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_flight", ["drop", "carry"])
def test_a_capture_after_any_event_continues_to_the_same_end(in_flight: str, way: str) -> None:
    unbroken = run_of(in_flight, way)
    events, after_pushes = 0, []

    def note(step: Step) -> None:
        nonlocal events
        events += 1
        if any(isinstance(e, Send) and isinstance(e.message, Push) for e in step.effects):
            after_pushes.append(events)

    unbroken.observers.append(note)
    while not unbroken.finished:
        unbroken.run(events=1)
    assert len(after_pushes) > 5
    for number in sorted({*range(1, events, 29), *after_pushes}):
        broken = run_of(in_flight, way)
        broken.observers.append(Stopper(broken, number))
        broken.run()
        saved = capture(broken, broken.sequence, {})
        resumed = run_of(in_flight, way, written(saved))
        assert resumed.run()
        assert_equal_end(resumed, unbroken)
        # What was captured has not changed while the run that it was taken of went on.
        broken.stopping.clear()
        assert broken.run()
        again = run_of(in_flight, way, written(saved))
        assert again.run()
        assert_equal_end(again, unbroken)


class Stopper:
    """Stops a run after so many events."""

    def __init__(self, run: VirtualClock, events: int) -> None:
        self._run, self._left = run, events

    def __call__(self, step: Step) -> None:
        self._left -= 1
        if self._left == 0:
            self._run.stop()
