"""Blending the global model in, and what becomes of work done meanwhile (DESIGN 4)."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halos.core.equations import OuterSettings, carried_base, merge
from halos.core.messages import Assignment, Drain, Push, PushAnswer
from halos.core.samples import Report
from halos.core.server import Server
from tests.core.builders import (
    PLAIN,
    finished,
    fragments,
    only,
    receive,
    sent,
    torch_state,
    values,
    working_region,
)
from tests.paper.plain import PlainLocalServer, PlainNesterov


def started(**settings: object) -> tuple[Server, Assignment]:
    """A region at theta = 100 with K = 2 and alpha = 0.25 that takes updates as they are."""
    tensors = torch_state(100.0, outer=PLAIN, parent=True)
    region, (first,) = working_region(tensors=tensors, **{"accumulation": 2, **settings})
    return region, first


def update(region: Server, assignment: Assignment, *gs: float) -> tuple[Assignment, Push | None]:
    push = None
    for g in gs:
        effects = receive(region, "w0", finished(assignment, g))
        assignment = only(effects, Assignment)
        push = sent(effects, Push).get("root", push)
    return assignment, push


def answer(region: Server, sequence: int, q: float) -> None:
    receive(region, "root", PushAnswer(sequence, 1, sequence, fragments(q)))


def theta(region: Server) -> float:
    return values(region.tensors.publish())[0]


class TestTheRightWayRound:
    """theta = (1-alpha)*theta + alpha*q. (The published code's help text states the blend the
    wrong way round; its code does this.)
    """

    def test_equation(self) -> None:
        out = torch.zeros(2)
        merge(torch.tensor([8.0, -8.0]), torch.tensor([0.0, 16.0]), 0.25, out=out)
        assert out.tolist() == [6.0, -2.0]

    def test_alpha_weighs_the_parents_model(self) -> None:
        region, assignment = started(merge_weight=0.25)
        update(region, assignment, 10.0, 10.0)
        answer(region, 1, 0.0)
        assert theta(region) == 60.0

    def test_alpha_of_one_takes_the_parents_model(self) -> None:
        region, assignment = started(merge_weight=1.0)
        update(region, assignment, 10.0, 10.0)
        answer(region, 1, 7.0)
        assert theta(region) == 7.0


class TestDrop:
    """What was applied between the cut and the merge then never enters a push: it only shifts
    where later rounds start. That is the paper's `in_flight = "drop"`.
    """

    def test_to_the_letter(self) -> None:
        region, assignment = started(in_flight="drop")
        assignment, push = update(region, assignment, 10.0, 10.0)
        assert push is not None and values(push.payload) == [20.0]
        assignment, _ = update(region, assignment, 4.0)  # in flight
        answer(region, 1, 0.0)
        assert theta(region) == 0.75 * (80.0 - 4.0)
        assignment, push = update(region, assignment, 1.0, 2.0)
        assert push is not None and values(push.payload) == [3.0]
        assert theta(region) == 0.75 * 76.0 - 3.0

    def test_its_steps_tokens_and_leases_are_reported_with_the_next_push(self) -> None:
        """Either way its steps, tokens and leases are reported with the next push."""
        region, assignment = started(in_flight="drop")
        assignment, first = update(region, assignment, 10.0, 10.0)
        assignment, _ = update(region, assignment, 4.0)
        answer(region, 1, 0.0)
        _, second = update(region, assignment, 1.0, 2.0)
        assert first is not None and second is not None
        assert first.report == Report(2, 8, 80, 160.0, ((0, 8),), ())
        assert second.report == Report(3, 12, 120, 240.0, ((12, 20),), ((8, 12),))


class TestCarry:
    """`in_flight = "carry"` sets `base = theta_merged + (theta_at_cut - theta_before_merge)`, so
    that it enters the next push.
    """

    def test_equation(self) -> None:
        out = torch.zeros(1)
        carried_base(torch.tensor([57.0]), torch.tensor([80.0]), torch.tensor([76.0]), out=out)
        assert out.tolist() == [61.0]

    def test_to_the_letter(self) -> None:
        region, assignment = started(in_flight="carry")
        assignment, _ = update(region, assignment, 10.0, 10.0)
        assignment, _ = update(region, assignment, 4.0)
        answer(region, 1, 0.0)
        assert theta(region) == 0.75 * 76.0
        _, push = update(region, assignment, 1.0, 2.0)
        assert push is not None and values(push.payload) == [4.0 + 1.0 + 2.0]

    def test_its_steps_tokens_and_leases_are_reported_with_the_next_push(self) -> None:
        region, assignment = started(in_flight="carry")
        assignment, _ = update(region, assignment, 10.0, 10.0)
        assignment, _ = update(region, assignment, 4.0)
        answer(region, 1, 0.0)
        _, push = update(region, assignment, 1.0, 2.0)
        assert push is not None
        assert push.report == Report(3, 12, 120, 240.0, ((8, 20),), ())

    def test_with_nothing_in_between_it_is_the_same_as_drop(self) -> None:
        regions = [started(in_flight=mode) for mode in ("drop", "carry")]
        pushes = []
        for region, assignment in regions:
            assignment, _ = update(region, assignment, 10.0, 10.0)
            answer(region, 1, 0.0)
            pushes.append(update(region, assignment, 1.0, 2.0)[1])
        assert values(pushes[0].payload) == values(pushes[1].payload) == [3.0]  # type: ignore[union-attr]

    def test_is_forced_when_nothing_is_left_to_issue(self) -> None:
        """when nothing is left to issue, servers push below K, `carry` is forced (DESIGN 5)"""
        tensors = torch_state(100.0, outer=PLAIN, parent=True)
        region, (assignment,) = working_region(
            12, tensors=tensors, accumulation=2, in_flight="drop"
        )
        assignment, _ = update(region, assignment, 10.0, 10.0)
        receive(region, "w0", finished(assignment, 4.0))
        receive(region, "root", Drain(1, 1))
        effects = receive(region, "root", PushAnswer(1, 1, 1, fragments(0.0)))
        push = only(effects, Push)
        assert values(push.payload) == [4.0]
        assert push.report == Report(1, 4, 40, 80.0, ((8, 12),), ())
        assert theta(region) == 0.75 * 76.0


class TestWhenItPushes:
    """`version += 1` a worker update. When `version >= merged_version + K` and no push is in
    flight: push.
    """

    @pytest.mark.parametrize("k", [1, 2, 3, 7])
    def test_at_the_kth_update_and_then_k_after_each_merge(self, k: int) -> None:
        region, assignment = started(accumulation=k)
        version = merged = 0
        for sequence in range(1, 5):
            meanwhile = sequence % 3
            for _ in range(k - 1):
                assignment, push = update(region, assignment, 1.0)
                assert push is None
            assignment, push = update(region, assignment, 1.0)
            assert push is not None and push.sequence == sequence
            assignment, push = update(region, assignment, *[1.0] * meanwhile)
            assert push is None
            answer(region, sequence, 0.0)
            version += k + meanwhile
            merged = version
            assert (region.state.version, region.state.merged_version) == (version, merged)


outer = st.builds(
    OuterSettings,
    rate=st.floats(0.05, 1.0),
    momentum=st.floats(0.0, 0.9),
    momentum_delay=st.integers(1, 5),
    momentum_share=st.sampled_from([0.0, 0.2]),
)


@given(
    outer=outer,
    k=st.integers(1, 5),
    alpha=st.floats(0.05, 1.0),
    mode=st.sampled_from(["drop", "carry"]),
    happenings=st.lists(st.none() | st.floats(-5, 5).map(lambda x: round(x, 2)), max_size=60),
)
def test_the_whole_local_server_is_the_pseudocode(
    outer: OuterSettings,
    k: int,
    alpha: float,
    mode: Literal["drop", "carry"],
    happenings: list[float | None],
) -> None:
    """A number is a worker's pseudo-gradient; ``None``: the answer to the push in flight comes."""
    plain = PlainLocalServer(
        PlainNesterov(
            100.0, outer.rate, outer.momentum, outer.momentum_delay, outer.momentum_share
        ),
        K=k,
        alpha=alpha,
        carry=mode == "carry",
        base=100.0,
    )
    tensors = torch_state(100.0, outer=outer, parent=True)
    region, (assignment,) = working_region(
        tensors=tensors, accumulation=k, merge_weight=alpha, in_flight=mode
    )
    in_flight: Push | None = None
    for g in happenings:
        if g is not None:
            assignment, push = update(region, assignment, g)
            u = plain.receive(g)
            assert (push is None) == (u is None)
            if push is not None:
                assert values(push.payload) == [pytest.approx(u, rel=1e-9, abs=1e-9)]
                in_flight = push
        elif in_flight is not None:
            q = 3.0 * in_flight.sequence
            answer(region, in_flight.sequence, q)
            plain.merge(q)
            in_flight = None
        assert theta(region) == pytest.approx(plain.outer.theta, rel=1e-9, abs=1e-9)
        assert region.state.version == plain.version
        assert region.state.merged_version == plain.merged_version
