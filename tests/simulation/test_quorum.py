"""Merging what a quorum has finished."""

from __future__ import annotations

import pytest

from halos.simulation.environment import Environment, EnvironmentRegion
from halos.simulation.methods import Method, Quorum
from halos.simulation.outcome import Outcome
from halos.simulation.quorum import QuorumRun
from halos.simulation.world import Experiment, World

FOUR = Environment(
    name="four",
    step_ms=1000,
    root_region="a",
    regions=(
        EnvironmentRegion(name="a", workers=(1.0, 0.5)),
        EnvironmentRegion(name="b", workers=(0.9, 0.1)),
    ),
)


def simulated(settings: Quorum, local_steps: int = 200) -> tuple[QuorumRun, Outcome]:
    experiment = Experiment(FOUR, Method("quorum", settings), local_steps=local_steps)
    run = QuorumRun(World(experiment, None), settings)
    return run, run.run()


def test_with_a_quorum_of_all_everybody_is_in_every_merge() -> None:
    run, outcome = simulated(Quorum(h=10, quorum=1.0))
    assert run.steps == {"a/0": 10, "a/1": 5, "b/0": 9, "b/1": 1}
    assert outcome.local_steps == 200
    assert outcome.elapsed_s == pytest.approx(8 * 10, abs=1e-6)  # a/1, b/0, b/1 need 10 s as well
    assert outcome.max_staleness == 0


def test_without_grace_half_of_them_do_not_wait_for_the_others() -> None:
    run, outcome = simulated(Quorum(h=16, quorum=0.25, grace=0.0))
    assert outcome.max_staleness is not None and outcome.max_staleness > 0
    assert run.version > 200 // sum(run.steps.values())


def test_grace_lets_more_into_a_merge() -> None:
    few, _ = simulated(Quorum(h=15, quorum=0.25, grace=0.0))
    more, _ = simulated(Quorum(h=15, quorum=0.25, grace=1.0))
    assert more.version < few.version


def test_samples_are_leased_once() -> None:
    run, outcome = simulated(Quorum(h=10))
    under_way = [job for _, _, _, job, _ in run._heap if job is not None]
    merged = outcome.tokens
    waiting = sum(arrived.done.tokens for arrived in run.waiting)
    assert merged + waiting + sum(job.lease.samples for job in under_way) == run.issued
