"""A run that was stopped and resumed equals the one that was never stopped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halos.core.messages import Assignment, Send
from halos.core.samples import Lease
from halos.errors import UserError
from halos.runtime.dispatcher import Step
from halos.runtime.local import Beginning, LocalRun, Order, open_run
from halos.runtime.prepare import Prepared
from halos.store.encoding import TensorTable, encoder
from halos.training.model import build_model
from halos.training.parameters import scatter

from .conftest import Prepare


@dataclass
class Outcome:
    """All that two equal runs have in common."""

    tensors: dict[str, list[Tensor]]
    states: dict[str, Any]
    moments: dict[str, dict[str, Tensor]]
    leases: list[Lease]
    now: float

    def assert_equals(self, other: Outcome) -> None:
        assert self.states == other.states
        assert self.leases == other.leases
        assert self.now == other.now
        for mine, theirs in ((self.tensors, other.tensors), (self.moments, other.moments)):
            assert mine.keys() == theirs.keys()
        for name, parts in self.tensors.items():
            assert all(map(torch.equal, parts, other.tensors[name])), name
        for worker, state in self.moments.items():
            assert all(torch.equal(t, other.moments[worker][k]) for k, t in state.items()), worker


def outcome(run: LocalRun, leases: list[Lease]) -> Outcome:
    tensors = {}
    for name, node in run.driver.nodes.items():
        if hasattr(node, "tensors"):
            for part, fragments in node.tensors.capture().items():
                tensors[f"{name}.{part}"] = [t.clone() for t in fragments.tensors]
    encode = encoder(TensorTable())
    states = {name: encode.unstructure(node.state) for name, node in run.driver.nodes.items()}
    moments = {name: trainer.capture(before=None) for name, trainer in run.trainers.items()}
    return Outcome(tensors, states, moments, leases, run.driver.now)


def train(
    prepared: Prepared, stops: tuple[int, ...], order: Order = "fixed", first: Beginning = "new"
) -> Outcome:
    """A run that is stopped, saved and opened again after each of so many events."""
    leases: list[Lease] = []

    def note(step: Step) -> None:
        for effect in step.effects:
            if isinstance(effect, Send) and isinstance(effect.message, Assignment):
                leases.append(effect.message.lease)  # noqa: PERF401

    beginning = first
    for events in (*stops, None):
        with open_run(prepared, order=order, beginning=beginning) as run:
            run.driver.observers.append(note)
            finished = run.run(events=events)
            run.save()
            assert finished == (events is None)
            if finished:
                return outcome(run, leases)
        beginning = "resume"
    raise AssertionError("the run did not finish")


def elsewhere(prepare: Prepare, folder: Path, **sections: Any) -> Prepared:
    return prepare(run={"name": "small", "directory": folder}, **sections)


@pytest.mark.parametrize("stops", [(1,), (40,), (173,), (60, 7, 111)])
def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(
    prepared: Prepare, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    unbroken = train(elsewhere(prepared, tmp_path / "unbroken"), ())
    assert len(unbroken.leases) > 30
    train(elsewhere(prepared, tmp_path / "broken"), stops).assert_equals(unbroken)


def test_so_does_one_of_three_tiers_that_carries_and_accumulates(
    prepared: Prepare, tmp_path: Path
) -> None:
    sections = {
        "regions": [
            {"name": "eu", "workers": 1},
            {"name": "rack", "workers": 2, "parent": "eu"},
            {"name": "us", "workers": [0.7]},
        ],
        "root": {"workers": [0.5]},
        "sync": {"local_steps": 3, "accumulation": 2, "in_flight": "carry"},
        "inner": {"device": "cpu", "accumulation": 2, "rewarm_steps": 30},
        "model": {"layers": 1, "heads": 2, "width": 16, "tied": False},
    }
    unbroken = train(elsewhere(prepared, tmp_path / "unbroken", **sections), ())
    broken = train(elsewhere(prepared, tmp_path / "broken", **sections), (90, 30))
    broken.assert_equals(unbroken)


def test_two_runs_of_the_same_specification_are_equal(prepared: Prepare, tmp_path: Path) -> None:
    first = train(elsewhere(prepared, tmp_path / "one"), ())
    second = train(elsewhere(prepared, tmp_path / "two"), ())
    second.assert_equals(first)


def test_another_seed_is_another_run(prepared: Prepare, tmp_path: Path) -> None:
    first = train(elsewhere(prepared, tmp_path / "one"), ())
    other = prepared(run={"name": "small", "directory": tmp_path / "two", "seed": 1})
    with pytest.raises(AssertionError):
        train(other, ()).assert_equals(first)


def test_a_checkpoint_taken_amid_the_run_does_not_change_it(
    prepared: Prepare, tmp_path: Path
) -> None:
    """Taken in the background, while what is captured goes on changing."""
    unbroken = train(elsewhere(prepared, tmp_path / "unbroken"), ())
    often = {"checkpoint": {"every_s": 1e-6, "keep": 2}, "evaluation": {"every_s": 1e-6}}
    disturbed = train(elsewhere(prepared, tmp_path / "disturbed", **often), ())
    disturbed.assert_equals(unbroken)
    # The newest but one was written amid the run: going on from it leads to the same end.
    checkpoints = sorted((tmp_path / "disturbed" / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for file in checkpoints[-1].iterdir():
        file.unlink()
    checkpoints[-1].rmdir()
    again = elsewhere(prepared, tmp_path / "disturbed")
    resumed = train(again, (), first="resume")
    resumed.leases = unbroken.leases
    resumed.assert_equals(unbroken)


def test_a_run_in_order_of_arrival_resumes_with_every_sample_credited_once(
    prepared: Prepare,
) -> None:
    small = prepared()
    beginning: Beginning = "new"
    for _ in range(100):
        with open_run(small, beginning=beginning) as run:
            ticks = iter(range(1))
            finished = run.run(tick=lambda: next(ticks, None) is None and run.stop())  # noqa: B023
            run.save()
            ledger = run.root.state.leasing.ledger
            if finished:
                break
        beginning = "resume"
    assert finished
    assert ledger.credited.as_tuple() == ((0, 180),)
    assert run.root.state.reported.local_steps >= 90


@pytest.mark.parametrize("tied", [True, False])
def test_tied_parameters_stay_tied(prepared: Prepare, tied: bool) -> None:
    small = prepared(model={"layers": 1, "heads": 2, "width": 16, "tied": tied})
    with open_run(small, order="fixed") as run:
        run.run(events=50)
        run.save()
    with open_run(small, order="fixed", beginning="resume") as run:
        run.run()
        model = build_model(small.model, seed=5)
        scatter(model, small.layout, run.model)
        assert (model.head.weight is model.embedding.weight) == tied
        assert torch.equal(model.head.weight, model.embedding.weight) == tied


def test_what_is_not_this_run_is_not_resumed(prepared: Prepare, tmp_path: Path) -> None:
    train(elsewhere(prepared, tmp_path / "run"), ())
    other_model = elsewhere(
        prepared, tmp_path / "run", model={"layers": 1, "heads": 2, "width": 24}
    )
    other_data = elsewhere(
        prepared,
        tmp_path / "run",
        data=prepared().specification.data.model_copy(update={"sequence_length": 8}),
    )
    other_tree = elsewhere(prepared, tmp_path / "run", regions=[{"name": "us", "workers": 3}])
    again = {"run": {"name": "small", "directory": tmp_path / "run"}}
    other_seed = prepared(run={**again["run"], "seed": 1})
    other_name = prepared(run={**again["run"], "name": "other"})
    longer = prepared(**again, training={"local_steps_total": 91, "batch_size": 2})
    reshaped = prepared(
        **again,
        regions=[
            {"name": "us", "workers": [1.0, 0.5]},
            {"name": "eu", "workers": [0.8], "parent": "us"},
        ],
    )
    for other, said in (
        (other_model, "another [model]"),
        (other_data, "another [data]"),
        (other_tree, "another [[regions]] and workers"),
        (other_seed, "another [run] seed"),
        (other_name, "another [run] name"),
        (longer, "another [training] length"),
        (reshaped, "another [[regions]] and workers"),
    ):
        with (
            pytest.raises(UserError, match=re.escape(said)),
            open_run(other, order="fixed", beginning="resume"),
        ):
            pass
    with (
        pytest.raises(UserError, match="already"),
        open_run(elsewhere(prepared, tmp_path / "run"), order="fixed"),
    ):
        pass
    with (
        pytest.raises(UserError, match="another --fixed-order"),
        open_run(elsewhere(prepared, tmp_path / "run"), beginning="resume"),
    ):
        pass


def test_replacing_a_run_removes_nothing_that_is_not_the_runs(
    prepared: Prepare, tmp_path: Path
) -> None:
    mine = tmp_path / "run" / "checkpoints" / "00000042" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    for _ in range(2):
        with open_run(prepared(), order="fixed", beginning="replace") as run:
            run.run()
            run.save()
    assert mine.read_text() == "years of work"
