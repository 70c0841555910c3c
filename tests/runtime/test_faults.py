"""What goes wrong inside a run is said, and does not hang it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halos.core.fragments import Fragments
from halos.core.messages import LocalStepsDone, RaiseFence, RunLocalSteps, Told
from halos.errors import UserError
from halos.runtime.dispatcher import Trainer
from halos.runtime.local import LocalRun, Order, open_run

from .conftest import Prepare


def not_finite(train: Trainer) -> Trainer:
    def trained(job: RunLocalSteps) -> LocalStepsDone:
        done = train(job)
        assert isinstance(done.payload, Fragments)
        bad = Fragments([torch.full_like(t, torch.nan) for t in done.payload.tensors])
        return replace(done, payload=bad)

    return trained


def sabotage(run: LocalRun, worker: str, rounds: int) -> None:
    """The worker's first rounds give NaN."""
    left = rounds
    train = run.driver.trainers[worker]

    def trained(job: RunLocalSteps) -> LocalStepsDone:
        nonlocal left
        left -= 1
        return not_finite(train)(job) if left >= 0 else train(job)

    run.driver.trainers[worker] = trained


@pytest.mark.parametrize("order", ["fixed", "arrival"])
def test_an_update_that_is_not_finite_is_refused_and_its_samples_are_trained_on(
    prepared: Prepare, order: Order
) -> None:
    with open_run(prepared(), order=order) as run:
        sabotage(run, "us/0", rounds=3)
        assert run.run()
        assert run.driver.refusals["non_finite"] == 3
        assert run.root.state.leasing.ledger.credited.as_tuple() == ((0, 180),)
        assert all(t.isfinite().all() for t in run.model.tensors)


@pytest.mark.parametrize("order", ["fixed", "arrival"])
def test_a_worker_that_only_gives_nan_ends_the_run_with_one_sentence(
    prepared: Prepare, order: Order
) -> None:
    small = prepared(training={"local_steps_total": 3_000, "batch_size": 2})
    with open_run(small, order=order) as run:
        sabotage(run, "us/0", rounds=10**9)
        with pytest.raises(UserError, match="worker us/0 computed numbers that are not finite"):
            run.run()
    with open_run(small, order=order, beginning="resume") as run:
        assert all(t.isfinite().all() for t in run.model.tensors)


@pytest.mark.parametrize("order", ["fixed", "arrival"])
def test_an_error_in_training_surfaces(prepared: Prepare, order: Order) -> None:
    def broken(job: RunLocalSteps) -> LocalStepsDone:
        raise UserError("data.train is t.bin, which holds token 300")

    with open_run(prepared(), order=order) as run:
        run.driver.trainers["eu/0"] = broken
        with pytest.raises(UserError, match="token 300"):
            run.run()


def test_a_lease_taken_away_amid_its_round_leaves_one_round_a_worker(prepared: Prepare) -> None:
    """The trainer does one round at a time, and a round that was taken away never was."""
    ends = []
    for name in ("one", "two"):
        folder = prepared().specification.run.directory / name
        small = prepared(
            run={"name": "small", "directory": folder},
            training={"local_steps_total": 300, "batch_size": 2},
            sync={"local_steps": 8, "accumulation": 2},
        )
        with open_run(small, order="fixed") as run:
            for _ in range(6):
                run.run(events=20)
                run.driver.dispatch("eu.members", Told(RaiseFence("eu/0")), run.driver.now)
            assert run.run()
            assert run.root.state.leasing.ledger.credited.as_tuple() == ((0, 600),)
            ends.append(run.model)
    assert all(map(torch.equal, ends[0].tensors, ends[1].tensors))


@pytest.mark.parametrize("order", ["fixed", "arrival"])
def test_a_branch_without_workers_keeps_no_samples(prepared: Prepare, order: Order) -> None:
    small = prepared(
        regions=[
            {"name": "a", "workers": 0},
            {"name": "b", "workers": 0, "parent": "a"},
            {"name": "us", "workers": 2},
        ],
        training={"local_steps_total": 60, "batch_size": 2, "lease_block": 20},
    )
    with open_run(small, order=order) as run:
        assert run.run()
        assert run.driver.now < 300  # it did not have to be reclaimed
