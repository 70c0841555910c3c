"""Somebody's own loop through ``Run``, against the loop that halos has itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halos.errors import UserError
from halos.run import Run
from halos.runtime.local import open_run
from halos.training.model import build_model
from halos.training.parameters import scatter

from .conftest import Prepare, Spec
from .joined import joined, side_by_side

ALONE = [{"name": "us", "workers": 1}]


def one_worker(specification: Spec, **sections: Any) -> Any:
    document = {
        "regions": ALONE,
        "training": {"local_steps_total": 30, "batch_size": 4},
        "sync": {"local_steps": 4},
    }
    return specification(**(document | sections))


def train(run: Run) -> None:
    for tokens, targets in run.batches():
        loss = run.loss(tokens, targets) / run.accumulation
        loss.backward()
        run.step(loss)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loop_of_ones_own_equals_the_built_in_one_bit_for_bit(
    specification: Spec, prepared: Prepare, accumulation: int
) -> None:
    inner = {"device": "cpu", "accumulation": accumulation}
    document = one_worker(specification, inner=inner)
    with joined(document) as ours:
        run = ours.join()
        train(run)
        assert run.finished
        assert ours.ledger.credited.as_tuple() == ((0, 120),)
        found = ours.model
    with open_run(prepared(**document.model_dump(by_alias=True, exclude_unset=True))) as theirs:
        assert theirs.run()
        for one, other in zip(found.tensors, theirs.model.tensors, strict=True):
            assert torch.equal(one, other)


def test_many_loops_train_every_sample_once(specification: Spec) -> None:
    with joined(specification()) as ours:
        runs = [ours.join(worker=name) for name in ours.handovers]
        side_by_side([lambda run=run: train(run) for run in runs])
        assert all(run.finished for run in runs)
        assert ours.ledger.credited.as_tuple() == ((0, 180),)
