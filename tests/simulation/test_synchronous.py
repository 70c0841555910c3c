"""The synchronous rivals: what a round costs, and what it does to the model."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from halos.core.fragments import Fragments
from halos.core.messages import RunLocalSteps
from halos.core.samples import Lease
from halos.simulation.environment import Environment, EnvironmentRegion
from halos.simulation.experiment import Experiment, run_experiment
from halos.simulation.laboratory import Laboratory, specification_of
from halos.simulation.methods import method_of
from halos.simulation.outcome import Outcome
from halos.simulation.ring import Ring, best_order
from halos.simulation.synchronous import SynchronousRun
from halos.simulation.world import World

ORACLE: dict[str, Any] = json.loads((Path(__file__).parent / "data/paper-4x4.json").read_text())
PAPER = Environment.load("paper-4x4")


def timed(text: str, *, local_steps: int) -> Outcome:
    return run_experiment(Experiment(PAPER, method_of(text), local_steps=local_steps))


@pytest.mark.parametrize(
    ("text", "facts", "steps"),
    [
        ("diloco", "diloco", 16 * 32),
        ("diloco-dynamic", "diloco_dylu", sum(ORACLE["diloco_dylu"]["H"])),
        ("data-parallel", "data_parallel", 16),
    ],
)
def test_a_round_takes_what_it_takes_on_the_published_simulator(
    text: str, facts: str, steps: int
) -> None:
    recorded = ORACLE[facts]
    rounds = 3
    outcome = timed(text, local_steps=rounds * steps)
    assert outcome.local_steps == rounds * steps
    a_round_ms = recorded["compute_ms"] + recorded["comm_ms"]
    assert outcome.elapsed_s * 1e3 == pytest.approx(rounds * a_round_ms, rel=1e-9)
    assert Ring.of(PAPER).seconds * 1e3 == pytest.approx(recorded["comm_ms"], rel=1e-9)
    assert Ring.of(PAPER).slowest_gbps == recorded["ring_gbps"]


def test_dynamic_local_updates_are_those_of_the_published_simulator() -> None:
    method = method_of("diloco-dynamic")
    run = SynchronousRun(World(Experiment(PAPER, method), None), method.settings)  # type: ignore[arg-type]
    assert list(run.steps.values()) == ORACLE["diloco_dylu"]["H"]


def test_wide_area_bytes_of_a_ring() -> None:
    """Each of the four links between regions carries 2 (n - 1) / n models a round."""
    outcome = timed("data-parallel", local_steps=16)
    assert outcome.wide_area_bytes == round(4 * 2 * 15 / 16 * PAPER.model_bytes)


def test_utilization_and_lanes_tell_who_waits() -> None:
    outcome = timed("diloco", local_steps=512)
    speeds = [speed for region in PAPER.regions for speed in region.workers]
    computed = sum(0.238391 * 32 / (speed / 0.907) for speed in speeds)
    assert outcome.utilization == pytest.approx(computed / (16 * outcome.elapsed_s))
    slowest, fastest = outcome.lanes["r2/3"], outcome.lanes["r0/1"]
    assert [span.activity for span in slowest] == ["compute"]  # beyond the window of a minute
    assert [span.activity for span in fastest] == ["compute", "wait"]
    assert fastest[-1].end_s == 60


def test_the_best_ring_is_the_one_of_all_whose_slowest_link_is_the_fastest() -> None:
    rates = ((9.0, 1.0, 5.0, 5.0), (1.0, 9.0, 4.0, 4.0), (5.0, 4.0, 9.0, 1.0), (5.0, 4.0, 1.0, 9.0))
    order = best_order([0, 1, 2, 3], rates)
    around = [*order, order[0]]
    assert min(rates[a][b] for a, b in pairwise(around)) == 4.0


def test_a_ring_of_many_regions_is_found_at_once() -> None:
    rates = tuple(tuple(1.0 + abs(a - b) for b in range(300)) for a in range(300))
    assert sorted(best_order(list(range(300)), rates)) == list(range(300))


def test_a_single_region_needs_no_wide_area() -> None:
    alone = Environment(
        name="alone",
        step_ms=10,
        model_bytes=10**9,
        root_region="a",
        regions=(EnvironmentRegion(name="a", workers=(1.0, 0.5)),),
        bandwidth_gbps=((8.0,),),
    )
    ring = Ring.of(alone)
    assert (ring.crossings, ring.wide_area_bytes, ring.seconds) == (0, 0, 1.0)


# ---------------------------------------------------------------- with gradients

TWO = Environment(
    name="two",
    step_ms=10,
    root_region="a",
    regions=(EnvironmentRegion(name="a", workers=(1.0, 0.5)),),
)


def trained(text: str, local_steps: int) -> SynchronousRun:
    torch.set_num_threads(1)
    specification = specification_of(TWO, None, seed=1, local_steps=local_steps)
    method = method_of(text)
    world = World(
        Experiment(TWO, method, 1, specification, local_steps=local_steps),
        Laboratory.of(specification),
    )
    run = SynchronousRun(world, method.settings)  # type: ignore[arg-type]
    run.run()
    return run


def tensors(run: SynchronousRun) -> torch.Tensor:
    theta = run.tensors.publish()
    assert isinstance(theta, Fragments)
    return torch.cat(theta.tensors)


def test_diloco_with_nothing_to_average_is_a_plain_loop() -> None:
    """One outer step of rate 1 without momentum is the mean of where the workers came to."""
    run = trained("diloco:h=2:rate=1:momentum=0", local_steps=4)
    laboratory = Laboratory.of(run.world.experiment.specification)  # type: ignore[arg-type]
    ends = []
    for index in range(2):
        lease = Lease(str(index), "text", 0, ((16 * index, 16 * index + 16),), 0)
        done = laboratory.trainer().run(RunLocalSteps(lease, 2, 8, laboratory.start))
        assert isinstance(done.payload, Fragments)
        ends.append(torch.cat(laboratory.start.tensors) - torch.cat(done.payload.tensors))
    assert torch.allclose(tensors(run), (ends[0] + ends[1]) / 2, atol=1e-6)


def test_data_parallel_is_one_loop_with_everybodys_samples() -> None:
    run = trained("data-parallel", local_steps=4)
    laboratory = Laboratory.of(run.world.experiment.specification)  # type: ignore[arg-type]
    lease = Lease("x", "text", 0, ((0, 32),), 0)
    done = laboratory.trainer().run(RunLocalSteps(lease, 2, 16, laboratory.start))
    assert isinstance(done.payload, Fragments)
    expected = torch.cat(laboratory.start.tensors) - torch.cat(done.payload.tensors)
    assert torch.allclose(tensors(run), expected, atol=1e-6)


def test_the_same_seed_gives_the_same_bits_and_progress_is_told() -> None:
    assert tensors(trained("diloco:h=2", 8)).equal(tensors(trained("diloco:h=2", 8)))
