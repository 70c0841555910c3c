"""What a run of servers is measured by, beside a timeline worked out by hand.

Two regions of one worker, every round 4 s, H 4 and 2, K 1. A model takes 1 s inside a region and
2.25 s between them; the root is in region a. Each lease is asked for when it is due, which in b
takes 0.5 s, and joining takes b 1 s before that::

    a/0  sent to 0-1, computes 1-5, 5-6 back; 6-7, 7-11, 11-12; 12-13, 13-17, 17-18
    b/0  waits 0-1.5, sent to -2.5, computes -6.5, -7.5 back; waits -8, -9, -13, -14; -14.5, -15.5
    root applies a's pushes at 7 and 13 (of versions 0 and 1), b's at 9.75 and 16.25 (0 and 2);
         b's first answer arrives at 12
"""

from __future__ import annotations

import gc
import weakref

import pytest

from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.messages import Message, NodeId, Push, Received, WorkerUpdate
from halos.core.samples import Report
from halos.core.server import Server, ServerSettings
from halos.core.tensors import NOTHING, NullPayload, NullState
from halos.core.topology import ROOT
from halos.runtime.dispatcher import Step
from halos.runtime.plan import RunPlan
from halos.runtime.virtual import VirtualClock
from halos.simulation.environment import Environment, EnvironmentRegion
from halos.simulation.outcome import Span
from halos.simulation.recording import Recorder

ENVIRONMENT = Environment(
    name="two",
    step_ms=1000,
    model_bytes=125_000_000,
    root_region="a",
    regions=(
        EnvironmentRegion(name="a", workers=(1.0,)),
        EnvironmentRegion(name="b", workers=(0.5,)),
    ),
    bandwidth_gbps=((1.0, 0.5), (0.5, 1.0)),
    latency_ms=250,
)
TREE = ENVIRONMENT.tree()
WORKERS = ("a/0", "b/0")


def size_bytes(sender: NodeId, to: NodeId, message: Message) -> int:
    between = sender[0] != to[0] and "b" in (sender[0], to[0])  # the root is in region a
    return ENVIRONMENT.model_bytes if between and getattr(message, "payload", None) else 0


def run(until: float, window_s: float | None = 7.75) -> tuple[VirtualClock, Recorder]:
    settings = ServerSettings(
        leasing=LeasingSettings(local_steps_of=TREE.local_steps(4), lease_block=0), accumulation=1
    )
    plan = RunPlan(
        topology=TREE,
        identity=Identity(run="run", model="model", datasets=("text",)),
        membership=MembershipSettings(heartbeat_interval_s=0),
        samples={"text": None},
        server_settings=lambda _: settings,
        tensors=lambda _: NullState(),
    )
    clock = VirtualClock(plan.nodes(), ENVIRONMENT.model_of(TREE))
    recorder = Recorder(WORKERS, size_bytes, window_s)
    clock.observers.append(recorder)
    clock.start()
    clock.run(until=until)
    return clock, recorder


def rounded(spans: tuple[Span, ...]) -> list[tuple[float, float, str]]:
    return [(round(s.start_s, 6), round(s.end_s, 6), s.activity) for s in spans]


def test_computing_time_includes_rounds_under_way() -> None:
    clock, recorder = run(until=17.5)
    assert clock.now == 17.5
    a, b = (5 - 1) + (11 - 7) + (17 - 13), (6.5 - 2.5) + (13 - 9) + (17.5 - 15.5)
    assert recorder.utilization(17.5) == pytest.approx((a + b) / (2 * 17.5))


def test_bytes_between_sites_count_when_they_arrive() -> None:
    _, recorder = run(until=17.5)
    assert recorder.wide_area_bytes == 3 * ENVIRONMENT.model_bytes  # two pushes, one answer


def test_staleness_is_that_of_what_the_root_applied() -> None:
    _, recorder = run(until=17.5)
    assert recorder.mean_staleness == (0 + 1 + 1 + 1) / 4
    assert recorder.max_staleness == 1


def test_what_the_root_refuses_is_not_stale() -> None:
    clock, recorder = run(until=17.5)
    fence = clock.nodes[ROOT].downstream.children["b"].fence
    for given, sequence in ((fence, 9), (fence, 1), (fence + 1, 3)):
        push = Push(sequence, given, -50, Report(updates=1), NOTHING)
        clock.dispatch(ROOT, Received("b", push), clock.now)
    assert recorder.max_staleness == 1
    assert recorder.mean_staleness == 3 / 4


def test_nothing_applied_is_no_staleness_at_all() -> None:
    _, recorder = run(until=6)
    assert (recorder.mean_staleness, recorder.max_staleness) == (None, None)


def test_lanes_show_the_window_span_after_span() -> None:
    _, recorder = run(until=17.5)
    lanes = recorder.lanes(17.5)
    assert rounded(lanes["a/0"]) == [
        (0, 1, "send"),
        (1, 5, "compute"),
        (5, 7, "send"),
        (7, 7.75, "compute"),
    ]
    assert rounded(lanes["b/0"]) == [
        (0, 1.5, "wait"),
        (1.5, 2.5, "send"),
        (2.5, 6.5, "compute"),
        (6.5, 7.5, "send"),
        (7.5, 7.75, "wait"),
    ]


def test_lanes_of_a_run_that_stopped_in_the_window_end_there() -> None:
    _, recorder = run(until=4)
    assert rounded(recorder.lanes(4)["a/0"]) == [(0, 1, "send"), (1, 4, "compute")]


def test_without_a_window_there_is_nothing_in_the_lanes() -> None:
    _, recorder = run(until=17.5, window_s=None)
    assert recorder.lanes(17.5) == {"a/0": (), "b/0": ()}


def test_only_so_many_workers_have_lanes() -> None:
    recorder = Recorder([f"r/{i}" for i in range(1000)], size_bytes, 1.0)
    assert list(recorder.lanes(0.0)) == [f"r/{i}" for i in range(64)]


def test_a_worker_that_died_computes_no_more_until_it_is_back() -> None:
    clock, recorder = run(until=3)
    clock.kill("a/0")
    recorder.ended("a/0", clock.now)
    clock.run(until=5)
    assert recorder.utilization(5) == pytest.approx(((3 - 1) + (5 - 2.5)) / 10)
    assert rounded(recorder.lanes(5)["a/0"]) == [(0, 1, "send"), (1, 3, "compute")]


def test_no_message_is_kept_alive() -> None:
    class Heavy(NullPayload):
        pass

    _, recorder = run(until=3)
    payload = Heavy()
    gone = weakref.ref(payload)
    update = WorkerUpdate("x", 1, 0, 1, 1, 0.0, 0.0, 0.0, payload)
    server = Server("a", ServerSettings(), NullState(), ROOT)
    recorder(Step(3.0, "a", Received("a/0", update), [], server))
    del payload, update
    gc.collect()
    assert gone() is None
