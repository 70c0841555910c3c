"""Deaths, outages and evictions at logical steps, on the virtual clock with heartbeats."""

from __future__ import annotations

from random import Random

import pytest

from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings, membership_of
from halos.core.messages import RaiseFence, Told
from halos.core.server import Server, ServerSettings
from halos.core.tensors import NullState
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.runtime.dispatcher import Step
from halos.runtime.plan import RunPlan
from halos.runtime.timing import UniformTime
from halos.runtime.virtual import VirtualClock

SAMPLES = 3_000
TREE = Topology(
    servers=(
        ServerPlace(ROOT, None),
        ServerPlace("us", ROOT),
        ServerPlace("eu", ROOT),
        ServerPlace("rack", "eu"),
    ),
    workers=tuple(
        WorkerPlace(f"{server}/{i}", server, 1 / (i + 1))
        for server, count in (("us", 3), ("eu", 1), ("rack", 2))
        for i in range(count)
    ),
)
FAULTS = ("kill worker", "kill server", "cut", "evict")


def plan() -> RunPlan:
    settings = ServerSettings(
        leasing=LeasingSettings(
            batch_size=2, local_steps=4, local_steps_of=TREE.local_steps(4), lease_horizon_s=2
        ),
        accumulation=3,
        drain_timeout_s=20,
    )
    return RunPlan(
        topology=TREE,
        identity=Identity(run="faults", model="m", datasets=("d",)),
        membership=MembershipSettings(heartbeat_interval_s=0.5, heartbeat_timeout_s=2, retry_s=0.5),
        samples={"d": SAMPLES},
        server_settings=lambda _: settings,
        tensors=lambda _: NullState(),
    )


class Faulty:
    """A run that suffers one fault after another, each mended some events later."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.plan = plan()
        self.clock = VirtualClock(self.plan.nodes(), UniformTime(TREE, step_s=0.05))
        self.trace: list[tuple[float, str, str]] = []
        self.clock.observers.append(self._note)
        self.clock.start()

    def _note(self, step: Step) -> None:
        self.trace.append((step.time, step.node, type(step.event).__name__))

    def suffer(self, fault: str) -> None:
        """Inject it, let time pass, mend it."""
        clock, random = self.clock, self.random
        server = random.choice(TREE.servers[1:])
        worker = random.choice(TREE.workers)
        pause = random.randrange(5, 400)
        match fault:
            case "kill worker":
                clock.kill(worker.name)
                clock.run(events=pause)
                clock.revive(self.plan.worker_nodes(worker))
            case "kill server":
                clock.kill(server.name)
                clock.run(events=pause)
                clock.revive(self.plan.server_nodes(server))
            case "cut":
                child = random.choice([server.name, worker.name])
                clock.cut_link(child)
                clock.run(events=pause)
                clock.mend_link(child)
            case "evict":
                notice = Told(RaiseFence(server.name))
                assert server.parent is not None
                clock.dispatch(membership_of(server.parent), notice, clock.now)
        clock.run(events=random.randrange(5, 200))

    @property
    def root(self) -> Server:
        root = self.clock.nodes[ROOT]
        assert isinstance(root, Server)
        return root


def suffer_and_finish(seed: int, faults: int) -> Faulty:
    run = Faulty(seed)
    run.clock.run(events=run.random.randrange(200))
    for _ in range(faults):
        run.suffer(run.random.choice(FAULTS))
    assert run.clock.run(until=run.clock.now + 3_600), "the run hangs"
    ledger = run.root.state.leasing.ledger
    assert ledger.credited.as_tuple() == ((0, SAMPLES),)
    assert ledger.delivered.total <= SAMPLES
    return run


@pytest.mark.parametrize("seed", range(25))
def test_a_run_ends_with_every_sample_credited_once_whatever_fails(seed: int) -> None:
    suffer_and_finish(seed, faults=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 2_000))
def test_so_do_a_thousand_others(seed: int) -> None:
    suffer_and_finish(seed, faults=12)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert suffer_and_finish(7, faults=6).trace == suffer_and_finish(7, faults=6).trace


def test_without_faults_nothing_is_refused() -> None:
    run = suffer_and_finish(0, faults=0)
    assert not run.clock.refusals


def test_a_region_that_stays_away_is_given_up_after_the_drain_timeout() -> None:
    run = Faulty(0)
    run.clock.run(events=300)
    run.clock.kill("us")
    assert run.clock.run(until=3_600)
    assert run.root.state.leasing.ledger.credited.total == SAMPLES


def test_a_region_without_workers_does_not_keep_its_samples() -> None:
    run = Faulty(0)
    run.clock.run(events=300)
    for i in range(3):
        run.clock.kill(f"us/{i}")
    assert run.clock.run(until=3_600)
    assert run.root.state.leasing.ledger.credited.total == SAMPLES
