"""What every driver owes its nodes, told once and held to by both that keep real time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import halos
from halos.core.fragments import Fragments
from halos.core.messages import LocalStepsDone
from halos.core.server import Server
from halos.core.state import TorchState
from halos.runtime.local import open_run
from halos.runtime.prepare import prepare
from halos.specification import RunSpecification
from halos.training.replica import Replica
from workers.worker import train

from .conftest import Spec
from .whole import END_S, whole_run

STEPS = 90


class Driven(ABC):
    """A way to drive a run of real nodes, in real time, from its start or from where it stopped."""

    refusals: Counter[str]
    finished: bool
    root: Server

    @abstractmethod
    def run(self, settings: RunSpecification, stop_at: int | None = None) -> None:
        """To the end, or until about ``stop_at`` samples were credited; then save."""

    def credited(self) -> int:
        return self.root.state.leasing.ledger.credited.total

    def ranges(self) -> list[tuple[int, int]]:
        return list(self.root.state.leasing.ledger.credited)


class InOneProcess(Driven):
    def run(self, settings: RunSpecification, stop_at: int | None = None) -> None:
        beginning = "resume" if (settings.run.directory / "checkpoints").exists() else "new"
        with open_run(prepare(settings), beginning=beginning) as run:  # type: ignore[arg-type]
            self.root = run.root

            def look() -> None:
                if stop_at is not None and self.credited() >= stop_at:
                    run.stop()

            run.driver.observers.append(lambda _: look())
            self.finished = run.run()
            run.save()
            self.refusals = run.driver.refusals


class OverGrpc(Driven):
    def run(self, settings: RunSpecification, stop_at: int | None = None) -> None:
        with whole_run(settings) as whole:
            self.root = whole.coordinator.server
            runs: list[halos.Run] = []

            def loop(run: halos.Run) -> None:
                runs.append(run)
                train(run)

            def look(_: object) -> None:
                if stop_at is not None and self.credited() >= stop_at:
                    for run in runs:
                        run.stop()
                    whole.coordinator.driver.stop()

            whole.coordinator.driver.observers.append(look)
            loops = [
                whole.train(loop, worker.parent, name=worker.name.partition("/")[2])
                for worker in settings.workers
            ]
            self.finished = whole.serving["root"].result(timeout=END_S)
            if not self.finished:
                for process in whole.regions.values():
                    process.driver.stop()
            for each in loops:
                each.result(timeout=END_S)
            for process in (whole.coordinator, *whole.regions.values()):
                process.save()
            servers = (whole.coordinator, *whole.regions.values())
            self.refusals = sum((p.driver.refusals for p in servers), Counter())


@pytest.fixture(params=[InOneProcess, OverGrpc])
def driven(request: pytest.FixtureRequest) -> Driven:
    made: Driven = request.param()
    return made


SHAPES: dict[str, dict[str, Any]] = {
    "drop": {"sync": {"local_steps": 2, "accumulation": 2, "in_flight": "drop"}},
    "carry": {"sync": {"local_steps": 2, "accumulation": 2, "in_flight": "carry"}},
    "bf16 on the wire": {"wire": {"workers": "bf16", "regions": "bf16"}},
    "no region": {"regions": [], "root": {"workers": 2}},
    "three tiers": {
        "regions": [
            {"name": "eu", "workers": 1},
            {"name": "rack", "workers": 2, "parent": "eu"},
        ]
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_comes_to_its_end_with_every_sample_credited_once(
    driven: Driven, specification: Spec, shape: str
) -> None:
    driven.run(specification(**SHAPES[shape]))
    assert driven.finished
    assert driven.ranges() == [(0, 2 * STEPS)]
    assert not driven.refusals


def test_an_update_that_is_not_finite_is_refused_and_counted_and_the_run_goes_on(
    driven: Driven, specification: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish: Callable[[Replica], LocalStepsDone] = Replica.finish
    spoiled: list[str] = []

    def spoil_the_first(replica: Replica) -> LocalStepsDone:
        done = finish(replica)
        if not spoiled:
            spoiled.append(done.lease)
            assert isinstance(done.payload, Fragments)
            done.payload.tensors[0][0] = torch.nan
        return done

    monkeypatch.setattr(Replica, "finish", spoil_the_first)
    driven.run(specification())
    assert driven.finished and driven.ranges() == [(0, 2 * STEPS)]
    assert driven.refusals == {"non_finite": 1}
    tensors = driven.root.tensors
    assert isinstance(tensors, TorchState)
    assert all(t.isfinite().all() for t in tensors.publish().tensors)


def test_a_run_that_was_stopped_goes_on_where_it_was(driven: Driven, specification: Spec) -> None:
    settings = specification(sync={"local_steps": 2, "accumulation": 1})
    driven.run(settings, stop_at=40)
    assert not driven.finished and 40 <= driven.credited() < 2 * STEPS
    before = driven.credited()
    driven.run(settings)
    assert driven.finished and driven.ranges() == [(0, 2 * STEPS)]
    assert before < 2 * STEPS
