"""What every driver owes its nodes, told once and held to by both that keep real time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import halos
from halos.core.fragments import Fragments
from halos.core.membership import Session, session_of
from halos.core.messages import Leave, LocalStepsDone, Node, Received
from halos.core.server import Server
from halos.core.state import TorchState
from halos.core.tensors import NullState
from halos.runtime.inprocess import InProcess
from halos.runtime.local import ALONE, open_run
from halos.runtime.plan import RunPlan
from halos.runtime.prepare import Prepared, prepare
from halos.specification import RunSpecification
from halos.training.replica import Replica
from workers.worker import train

from .conftest import Spec
from .whole import END_S, whole_run

STEPS = 90
Story = list[tuple[int, str, str]]  # at how many credited samples what happens to whom


class Driven(ABC):
    """A way to drive a run of real nodes, in real time, from its start or from where it stopped."""

    refusals: Counter[str]
    finished: bool
    root: Server
    to_come: Story

    @abstractmethod
    def run(self, settings: RunSpecification, stop_at: int | None = None) -> None:
        """To the end, or until about ``stop_at`` samples were credited; then save."""

    @abstractmethod
    def go_through(self, settings: RunSpecification, story: Story) -> None:
        """To the end, while this happens.

        A worker "ends", or "leaves" with a goodbye, and "starts" from nothing; a region
        "is cut off" and "is linked".
        """

    def happens(self, story: Story, act: Callable[[str, str], bool]) -> Callable[..., None]:
        """To be called now and again: does what is due, once ``act`` says that it could be."""
        self.to_come = list(story)

        def look(*_: object) -> None:
            while self.to_come and self.credited() >= self.to_come[0][0]:
                if not act(*self.to_come[0][1:]):
                    return
                del self.to_come[0]

        return look

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

    def go_through(self, settings: RunSpecification, story: Story) -> None:
        with open_run(prepare(settings)) as run:
            self.root, driver = run.root, run.driver
            assert isinstance(driver, InProcess)

            def act(what: str, whom: str) -> bool:
                match what:
                    case "ends":
                        driver.kill(whom)
                    case "leaves":
                        say_goodbye(driver, whom)
                        driver.kill(whom)
                    case "starts":
                        driver.trainers[whom] = run.prepared.trainer().run
                        driver.revive(worker_nodes(run.prepared, whom))
                    case "is cut off":
                        driver.cut_link(whom)
                    case "is linked":
                        driver.mend_link(whom)
                return True

            self.finished = driver.run(tick=self.happens(story, act), tick_s=0.001)
            self.refusals = driver.refusals


def say_goodbye(driver: InProcess, worker: str) -> None:
    session = driver.nodes[session_of(worker)]
    assert isinstance(session, Session) and session.state.fence is not None
    goodbye = Received(session_of(worker), Leave(session.state.fence))
    driver.dispatch(session.membership, goodbye, driver.now)


def worker_nodes(prepared: Prepared, name: str) -> dict[str, Node]:
    """Of a worker that starts from nothing."""
    topology = prepared.specification.topology
    plan = RunPlan(
        topology=topology,
        identity=prepared.identity,
        membership=ALONE,
        samples={},
        server_settings=lambda _: prepared.server_settings(),
        tensors=lambda _: NullState(),
    )
    return plan.worker_nodes(next(w for w in topology.workers if w.name == name))


class OverGrpc(Driven):
    def go_through(self, settings: RunSpecification, story: Story) -> None:
        with whole_run(settings, linked=True) as whole:
            self.root = whole.coordinator.server
            runs: dict[str, halos.Run] = {}
            loops: list[Future[Any]] = []

            def start(worker: str) -> None:
                server, _, name = worker.partition("/")

                def loop(run: halos.Run) -> None:
                    runs[worker] = run
                    train(run)

                loops.append(whole.train(loop, server, name=name))

            def act(what: str, whom: str) -> bool:
                match what:
                    case "ends" | "leaves":  # e2e/test_kills.py has processes that end unheard
                        if whom not in runs:
                            return False  # it has not joined yet
                        runs.pop(whom).stop()
                    case "starts":
                        start(whom)
                    case "is cut off":
                        whole.links[whom].cut("reset")
                    case "is linked":
                        whole.links[whom].mend()
                return True

            whole.coordinator.driver.observers.append(self.happens(story, act))
            for worker in settings.workers:
                start(worker.name)
            whole.end(*loops)
            self.finished = whole.serving["root"].result()
            servers = (whole.coordinator, *whole.regions.values())
            self.refusals = sum((p.driver.refusals for p in servers), Counter())

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
    "bf16 on the wire": {
        "wire": {"workers": "bf16", "uplink": "bf16+ef", "downlink": "bf16-delta"}
    },
    "few bits on the wire": {
        "wire": {"workers": "fp16", "uplink": "int4+ef+zstd", "downlink": "int8-delta"}
    },
    "two bits and the largest": {"wire": {"uplink": "int2+zstd+ef", "downlink": "topk+zstd-delta"}},
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


STORIES: dict[str, Story] = {
    "a worker ends and starts again": [(20, "ends", "us/1"), (100, "starts", "us/1")],
    "a worker leaves for good": [(20, "leaves", "us/1")],
    "a worker leaves and comes again": [(20, "leaves", "us/1"), (100, "starts", "us/1")],
    "a region's only worker ends and starts again": [
        (20, "ends", "eu/0"),
        (100, "starts", "eu/0"),
    ],
    "a region is cut off and linked again": [(20, "is cut off", "eu"), (100, "is linked", "eu")],
}


@pytest.mark.parametrize("story", STORIES)
def test_whoever_goes_and_comes_back_every_sample_is_credited_once(
    driven: Driven, specification: Spec, story: str
) -> None:
    membership = {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 5.0, "retry_s": 0.1}
    # What a region that is cut off holds in stock, no other can do before the story goes on.
    training = {"local_steps_total": STEPS, "batch_size": 2, "lease_horizon_s": 1e-3}
    settings = specification(membership=membership, training=training)
    driven.go_through(settings, STORIES[story])
    assert driven.finished and not driven.to_come
    assert driven.ranges() == [(0, 2 * STEPS)]


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
