"""Same seed, same trace, bit for bit (DESIGN 3)."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.core.server import ServerSettings
from halos.core.state import TorchState
from halos.core.topology import ROOT
from halos.runtime.plan import RunPlan
from halos.runtime.trace import TraceWriter
from halos.runtime.virtual import VirtualClock
from halos.simulation.environment import Environment

SAMPLES = 12_000


@dataclass
class NoisyQuadratic:
    """Steps down a bowl, each lease with noise of its own: a trainer cheap enough to repeat."""

    seed: int

    def __call__(self, job: RunLocalSteps) -> LocalStepsDone:
        (theta,) = job.payload.tensors
        noise = torch.Generator().manual_seed(self.seed + job.lease.ranges[0][0])
        shift = torch.randn(theta.shape, generator=noise)
        g = 0.1 * (theta + shift)
        return LocalStepsDone(
            lease=job.lease.id,
            local_steps=job.local_steps,
            tokens=job.lease.samples,
            loss=theta.square().sum().item(),
            norm=g.norm().item(),
            seconds=0.0,
            payload=Fragments([g]),
        )


def run(*, seed: int, threads: int = 0) -> tuple[str, bytes]:
    """The trace and the root's final parameters; a worker dies and a link fails on the way."""
    environment = Environment.load("paper-4x4")
    topology = environment.tree()
    settings = ServerSettings(
        leasing=LeasingSettings(batch_size=8, local_steps_of=topology.local_steps(8)),
        accumulation=6,
    )
    outer = OuterSettings(rate=0.2, momentum=0.9, momentum_delay=4)
    plan = RunPlan(
        topology=topology,
        identity=Identity(run="run", model="model", datasets=("text",)),
        membership=MembershipSettings(),
        samples={"text": SAMPLES},
        server_settings=lambda name: settings,
        tensors=lambda name: TorchState.start(
            Fragments([torch.ones(5)]), outer, has_parent=name != ROOT
        ),
    )
    nodes = plan.nodes()
    trainers = {worker.name: NoisyQuadratic(seed) for worker in topology.workers}
    driver = VirtualClock(nodes, environment.model_of(topology), trainers, threads=threads)
    trace = io.StringIO()
    driver.observers.append(TraceWriter(trace))
    driver.start()
    driver.run(events=400)
    driver.kill("r1/2")
    driver.cut_link("r3")
    driver.run(events=400)
    driver.mend_link("r3")
    assert driver.run()
    driver.close()
    root = nodes[ROOT]
    assert root.state.leasing.ledger.credited.as_tuple() == ((0, SAMPLES),)
    (theta,) = root.tensors.publish().tensors
    return trace.getvalue(), theta.numpy().tobytes()


@pytest.fixture(scope="module")
def once() -> tuple[str, bytes]:
    return run(seed=1)


def test_the_same_seed_gives_the_same_trace_and_parameters(once: tuple[str, bytes]) -> None:
    assert run(seed=1) == once


def test_threads_change_no_number(once: tuple[str, bytes]) -> None:
    assert run(seed=1, threads=2) == once


def test_another_seed_gives_other_parameters(once: tuple[str, bytes]) -> None:
    assert run(seed=2)[1] != once[1]


def test_another_process_that_hashes_otherwise_gives_the_same(once: tuple[str, bytes]) -> None:
    code = "from tests.simulation import test_determinism as t; print(t.digest(t.run(seed=1)))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest(once)


def digest(result: tuple[str, bytes]) -> str:
    trace, parameters = result
    return hashlib.sha256(trace.encode() + parameters).hexdigest()
