"""Any depth of tree works: worker, rack, region, root, in closed form and to the last sample."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from halos.core.equations import OuterSettings
from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.messages import Grant, LocalStepsDone, Push, PushAnswer, Received, RunLocalSteps
from halos.core.samples import Block, Report
from halos.core.server import Server, ServerSettings
from halos.core.topology import ServerPlace, Topology, WorkerPlace
from halos.runtime.dispatcher import Step
from halos.runtime.plan import RunPlan
from halos.runtime.timing import UniformTime
from halos.runtime.virtual import VirtualClock
from tests.core.builders import (
    found,
    fragments,
    join_region,
    meet_parent,
    only,
    push_of,
    receive,
    region_server,
    request_of,
    root_server,
    torch_state,
    values,
)
from tests.paper.plain import PlainLocalServer, PlainNesterov

SERVERS = {"root": None, "eu": "root", "rack": "eu"}
OUTER = {
    "rack": OuterSettings(rate=0.5, momentum=0.9, momentum_delay=3),
    "eu": OuterSettings(rate=0.8, momentum=0.5, momentum_delay=2),
    "root": OuterSettings(rate=0.6, momentum=0.3, momentum_delay=4),
}
K = {"rack": 2, "eu": 3, "root": 99}
ALPHA = {"rack": 0.25, "eu": 0.5, "root": 1.0}
START = 10.0


@dataclass
class Run:
    """A run of one worker under three servers, with no message taking time."""

    samples: int
    pushes: dict[str, list[Push]] = field(default_factory=lambda: {"rack": [], "eu": []})
    gs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        topology = Topology(
            tuple(ServerPlace(name, parent) for name, parent in SERVERS.items()),
            (WorkerPlace("w", "rack"),),
        )
        plan = RunPlan(
            topology=topology,
            identity=Identity(run="run", model="model", datasets=("text",)),
            membership=MembershipSettings(heartbeat_interval_s=0),
            samples={"text": self.samples},
            server_settings=lambda name: ServerSettings(
                leasing=LeasingSettings(batch_size=1, local_steps=4, lease_block=0),
                accumulation=K[name],
                merge_weight=ALPHA[name],
            ),
            tensors=lambda name: torch_state(START, outer=OUTER[name], parent=name != "root"),
        )
        self.nodes = plan.nodes()
        driver = VirtualClock(self.nodes, UniformTime(topology), {"w": self.train})
        driver.observers.append(self.observe)
        driver.start()
        assert driver.run(events=10_000)
        assert driver.refusals.total() == 0

    def train(self, job: RunLocalSteps) -> LocalStepsDone:
        """A pseudo-gradient that depends on where the round started."""
        (theta,) = values(job.payload)
        g = 0.1 * theta + 1.0 + len(self.gs) % 5
        self.gs.append(g)
        tokens = 10 * job.lease.samples
        return LocalStepsDone(job.lease.id, job.local_steps, tokens, 2.0, g, 0.0, fragments(g))

    def observe(self, step: Step) -> None:
        match step.event:
            case Received(sender, Push() as push):
                self.pushes[sender].append(push)

    def server(self, name: str) -> Server:
        node = self.nodes[name]
        assert isinstance(node, Server)
        return node


def plain_run(gs: list[float]) -> tuple[dict[str, list[float]], float]:
    """Pushes of the tree in plain floats, and the root's parameters at the end."""
    rack, eu, root = _plain("rack"), _plain("eu"), _nesterov("root")
    pushes: dict[str, list[float]] = {"rack": [], "eu": []}
    for g in gs:
        u = rack.receive(g)
        if u is None:
            continue
        pushes["rack"].append(u)
        v = eu.receive(u)
        rack.merge(eu.outer.theta)  # as it is right after the push was applied
        if v is not None:
            pushes["eu"].append(v)
            root.receive(v)
            eu.merge(root.theta)
    return pushes, root.theta


def _nesterov(name: str) -> PlainNesterov:
    outer = OUTER[name]
    return PlainNesterov(START, outer.rate, outer.momentum, outer.momentum_delay)


def _plain(name: str) -> PlainLocalServer:
    return PlainLocalServer(_nesterov(name), K[name], ALPHA[name], carry=False, base=START)


ROUNDS = 24  # a multiple of 2 and of 3 * 2: nothing is left over for the draining


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(samples=4 * ROUNDS)


def test_each_tier_pushes_what_its_pseudocode_says(run: Run) -> None:
    expected, _ = plain_run(run.gs)
    assert len(run.gs) == ROUNDS
    for name, pushes in expected.items():
        assert [values(p.payload)[0] for p in run.pushes[name]] == pytest.approx(pushes)


def test_the_root_ends_where_its_pseudocode_says(run: Run) -> None:
    _, theta = plain_run(run.gs)
    assert values(run.server("root").tensors.publish()) == pytest.approx([theta])


def test_every_sample_is_credited_and_delivered(run: Run) -> None:
    ledger = run.server("root").state.leasing.ledger
    assert ledger.credited.as_tuple() == ledger.delivered.as_tuple() == ((0, 4 * ROUNDS),)
    assert run.server("root").state.reported == Report(
        ROUNDS, 4 * ROUNDS, 40 * ROUNDS, 2.0 * 40 * ROUNDS
    )


def test_what_is_left_over_below_k_is_drained() -> None:
    run = Run(samples=4 * 18 + 3)
    ledger = run.server("root").state.leasing.ledger
    assert ledger.credited.as_tuple() == ledger.delivered.as_tuple() == ((0, 75),)
    assert run.server("root").state.reported.updates == 19
    for pushes in run.pushes.values():
        assert sum(push.report.updates for push in pushes) == 19
        assert pushes[-1].report.updates == 1  # below K


@pytest.fixture
def region() -> Server:
    """The middle of the tree, by hand: eu under the root, with a rack that holds 0 to 100."""
    region = region_server(tensors=torch_state(100.0, parent=True), accumulation=2)
    meet_parent(region)
    join_region(region, "rack", fence=1)
    receive(region, "rack", request_of(1, 100))
    request = region.state.leasing.request
    assert request is not None and request.need == 100
    block = Block("text", 0, 300, 400, 300)
    grant = only(receive(region, "root", Grant(1, request.number, (block,))), Grant, "rack")
    assert grant.blocks == (block,)
    return region


def rack_push(sequence: int, u: float, start: int, end: int, **report: object) -> Push:
    return push_of(sequence, u, contained=((start, end),), updates=1, **report)


def test_a_region_answers_a_rack_with_its_own_model_at_once(region: Server) -> None:
    answer = only(receive(region, "rack", rack_push(1, 4.0, 300, 310)), PushAnswer, "rack")
    assert (values(answer.payload), answer.version) == ([96.0], 1)


def test_a_region_counts_k_in_pushes_of_its_racks(region: Server) -> None:
    assert not found(receive(region, "rack", rack_push(1, 4.0, 300, 310)), Push)
    push = only(receive(region, "rack", rack_push(2, 6.0, 310, 320)), Push, "root")
    assert values(push.payload) == [10.0]
    assert push.report == Report(updates=2, contained=((300, 320),))


def test_what_a_rack_dropped_stays_dropped_at_every_tier(region: Server) -> None:
    receive(region, "rack", rack_push(1, 4.0, 300, 310, dropped=((310, 320),)))
    push = only(receive(region, "rack", rack_push(2, 6.0, 320, 330)), Push)
    assert push.report.contained == ((300, 310), (320, 330))
    assert push.report.dropped == ((310, 320),)


def test_what_a_region_drops_was_credited_but_never_delivered(region: Server) -> None:
    root = root_server(1000, tensors=torch_state(0.0))
    join_region(root, "eu", fence=1)
    receive(root, "eu", request_of(1, 400))
    receive(region, "rack", rack_push(1, 4.0, 300, 310))
    first = only(receive(region, "rack", rack_push(2, 6.0, 310, 320)), Push)
    receive(region, "rack", rack_push(3, 8.0, 320, 330))  # while the first is in flight
    receive(region, "root", only(receive(root, "eu", first), PushAnswer))
    receive(region, "rack", rack_push(4, 1.0, 330, 340))
    second = only(receive(region, "rack", rack_push(5, 2.0, 340, 350)), Push)
    receive(root, "eu", second)
    ledger = root.state.leasing.ledger
    assert ledger.credited.as_tuple() == ((300, 350),)
    assert ledger.delivered.as_tuple() == ((300, 320), (330, 350))
    assert values(root.tensors.publish()) == [-(4.0 + 6.0) - (1.0 + 2.0)]
    assert root.state.reported.updates == 5
