"""What a server refuses, with which reason, and that nothing of it is left behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from halos.core.fragments import Fragments
from halos.core.messages import (
    Assignment,
    Effect,
    Grant,
    MemberJoined,
    MemberLost,
    Message,
    PushAnswer,
    RaiseFence,
    Ready,
    Reject,
    Resume,
    Resumed,
)
from halos.core.server import Server
from halos.core.tensors import Payload
from tests.core.builders import (
    finished,
    found,
    fragments,
    join_region,
    join_worker,
    only,
    push_of,
    receive,
    request_of,
    root_server,
    tell,
    torch_state,
    values,
)

BAD: dict[str, tuple[Payload, str]] = {
    "nan": (fragments(math.nan, 0.0), "non_finite"),
    "infinite": (fragments(0.0, math.inf), "non_finite"),
    "short": (fragments(1.0), "wrong_shape"),
    "long": (fragments(1.0, 1.0, 1.0), "wrong_shape"),
    "another count": (Fragments([*fragments(1.0, 1.0).tensors] * 2), "wrong_shape"),
    "another type": (Fragments([torch.ones(2)]), "wrong_shape"),
}


@pytest.fixture
def root() -> Server:
    """A root with a region of 100 samples, another of 100, and a worker on a lease."""
    root = root_server(tensors=torch_state(1.0, 2.0))
    for fence, name in enumerate(("eu", "us"), start=1):
        join_region(root, name, fence=fence)
        receive(root, name, request_of(1, 100, fence=fence))
    join_worker(root, "w0", fence=3)
    return root


def books(server: Server) -> object:
    """All that an update might change, but for who waits for what."""
    tensors, state = server.tensors.capture(), server.state  # type: ignore[attr-defined]
    return deepcopy(
        (
            {name: values(part) for name, part in tensors.items()},
            state.version,
            state.reported,
            state.leasing.ledger.credited.as_tuple(),
            state.leasing.ledger.delivered.as_tuple(),
        )
    )


def assignment_of(root: Server, name: str = "w0") -> Assignment:
    """Its outstanding assignment again."""
    fence = root.state.leasing.children[name].fence
    assert fence is not None
    return only(receive(root, name, Ready(fence, None)), Assignment)


def refusal_of(root: Server, sender: str, message: Message) -> tuple[Reject, list[Effect]]:
    """Send ``message``, which must be refused without a trace in the books."""
    before = books(root)
    effects = receive(root, sender, message)
    assert books(root) == before
    refusal = only(effects, Reject)
    assert refusal.to == sender
    return refusal, effects


class TestBadTensors:
    @pytest.mark.parametrize("case", BAD)
    def test_of_a_worker(self, root: Server, case: str) -> None:
        payload, reason = BAD[case]
        before = assignment_of(root)
        refusal, effects = refusal_of(root, "w0", finished(before, payload=payload))
        assert (refusal.reason, refusal.key) == (reason, before.lease.id)
        after = only(effects, Assignment, "w0")
        assert after.lease.id != before.lease.id
        assert after.lease.ranges == before.lease.ranges  # nobody trained on it yet

    @pytest.mark.parametrize("case", BAD)
    def test_of_a_region(self, root: Server, case: str) -> None:
        payload, reason = BAD[case]
        refusal, effects = refusal_of(
            root, "eu", push_of(1, payload=payload, contained=((0, 10),), updates=3)
        )
        assert (refusal.reason, refusal.key) == (reason, "1")
        assert found(effects, RaiseFence, "root.members") == [RaiseFence("eu")]
        assert not found(effects, PushAnswer)

    def test_a_refused_update_that_comes_again_is_refused_again(self, root: Server) -> None:
        update = finished(assignment_of(root), math.nan, 0.0)
        _, effects = refusal_of(root, "w0", update)
        outstanding = only(effects, Assignment)
        _, effects = refusal_of(root, "w0", update)
        assert only(effects, Assignment).lease == outstanding.lease


FROM_A_REGION: dict[str, Callable[[int], Message]] = {
    "push": lambda fence: push_of(1, 1.0, 1.0, fence=fence, contained=((0, 10),)),
    "request": lambda fence: request_of(2, 10, fence=fence),
    "resume": lambda fence: Resume(fence, 1, 0, False, 0),
}


class TestSenders:
    @pytest.mark.parametrize("kind", FROM_A_REGION)
    def test_unknown(self, root: Server, kind: str) -> None:
        refusal, _ = refusal_of(root, "stranger", FROM_A_REGION[kind](1))
        assert refusal.reason == "unknown_sender"

    @pytest.mark.parametrize("kind", FROM_A_REGION)
    @pytest.mark.parametrize("fence", [0, 2, 99])
    def test_fenced(self, root: Server, kind: str, fence: int) -> None:
        refusal, _ = refusal_of(root, "eu", FROM_A_REGION[kind](fence))
        assert (refusal.reason, refusal.fence) == ("fenced", fence)

    @pytest.mark.parametrize("kind", FROM_A_REGION)
    def test_of_the_wrong_role(self, root: Server, kind: str) -> None:
        refusal, _ = refusal_of(root, "w0", FROM_A_REGION[kind](3))
        assert refusal.reason == "wrong_role"

    @pytest.mark.parametrize("kind", FROM_A_REGION)
    def test_given_up(self, root: Server, kind: str) -> None:
        tell(root, MemberLost("eu"))
        refusal, _ = refusal_of(root, "eu", FROM_A_REGION[kind](1))
        assert refusal.reason == "fenced"

    def test_workers_too(self, root: Server) -> None:
        update = finished(assignment_of(root), 1.0, 1.0)
        assert refusal_of(root, "stranger", update)[0].reason == "unknown_sender"
        tell(root, MemberJoined("w0", "worker", 9, ("text",)))
        assert refusal_of(root, "w0", update)[0].reason == "fenced"
        assert refusal_of(root, "w0", Ready(3, None))[0].reason == "fenced"
        eu = finished(assignment_of(root), 1.0, 1.0, fence=1)
        assert refusal_of(root, "eu", eu)[0].reason == "wrong_role"
        assert refusal_of(root, "eu", Ready(1, None))[0].reason == "wrong_role"


class TestLeases:
    def test_a_lease_of_nobody(self, root: Server) -> None:
        outstanding = assignment_of(root)
        update = finished(outstanding, 1.0, 1.0, lease="root/0/99")
        refusal, effects = refusal_of(root, "w0", update)
        assert (refusal.reason, refusal.key) == ("unknown_lease", "root/0/99")
        assert only(effects, Assignment).lease == outstanding.lease

    def test_a_lease_of_another_worker(self, root: Server) -> None:
        join_worker(root, "w1", fence=4)
        other = assignment_of(root, "w1").lease.id
        update = finished(assignment_of(root), 1.0, 1.0, lease=other)
        assert refusal_of(root, "w0", update)[0].reason == "unknown_lease"


class TestReports:
    """A region can report only what it was granted, once. It held 0 to 100, another 100 to 200."""

    @pytest.mark.parametrize(
        "report",
        [
            {"contained": ((90, 110),)},
            {"contained": ((100, 110),)},
            {"contained": ((300, 310),)},  # nobody's
            {"contained": ((-10, 10),)},
            {"contained": ((0, 10), (5, 15))},
            {"contained": ((0, 10), (0, 10))},
            {"contained": ((0, 10),), "dropped": ((9, 12),)},
            {"contained": ((0, 10),), "dropped": ((0, 10),)},
            {"contained": ((0, 10),), "dropped": ((150, 160),)},
            {"dropped": ((99, 101),)},
        ],
    )
    def test_of_what_was_not_granted(self, root: Server, report: dict[str, object]) -> None:
        refusal, effects = refusal_of(root, "eu", push_of(1, 1.0, 1.0, **report))
        assert refusal.reason == "not_granted"
        assert found(effects, RaiseFence, "root.members") == [RaiseFence("eu")]

    @pytest.mark.parametrize("report", [{"contained": ((0, 10),)}, {"dropped": ((15, 25),)}])
    def test_of_what_was_reported_already(self, root: Server, report: dict[str, object]) -> None:
        receive(root, "eu", push_of(1, 1.0, 1.0, contained=((0, 10),), dropped=((10, 20),)))
        refusal, _ = refusal_of(root, "eu", push_of(2, 1.0, 1.0, **report))
        assert refusal.reason == "not_granted"

    @pytest.mark.parametrize("sequence", [2, 99])
    def test_out_of_sequence(self, root: Server, sequence: int) -> None:
        refusal, _ = refusal_of(root, "eu", push_of(sequence, 1.0, 1.0, contained=((10, 20),)))
        assert refusal.reason == "out_of_sequence"

    def test_after_a_refusal_its_samples_go_to_others_and_it_starts_again(
        self, root: Server
    ) -> None:
        receive(root, "us", request_of(2, 900, fence=2))
        receive(root, "us", request_of(3, 50, fence=2))  # waits: nothing is left
        effects = receive(root, "eu", push_of(1, 1.0, 1.0, contained=((90, 110),)))
        assert only(effects, Grant, "us").blocks[0].start == 0
        back = join_region(root, "eu", fence=9, tenure=1, sequence=1, in_flight=True)
        resumed = only(back, Resumed, "eu")
        assert resumed.reset and resumed.payload is not None
        assert values(resumed.payload) == [1.0, 2.0]


def test_a_repeated_push_gets_the_same_verdict(root: Server) -> None:
    push = push_of(1, 1.0, 1.0, contained=((0, 10),))
    first = only(receive(root, "eu", push), PushAnswer, "eu")
    before = books(root)
    again = only(receive(root, "eu", push), PushAnswer, "eu")
    assert (again.sequence, again.version) == (first.sequence, first.version)
    assert books(root) == before


@pytest.mark.parametrize("field", ["loss", "norm"])
def test_an_update_whose_loss_is_not_a_number_does_not_enter_the_books(
    root: Server, field: str
) -> None:
    update = finished(assignment_of(root), 1.0, 1.0)
    before = books(root)
    effects = receive(root, "w0", replace(update, **{field: math.nan}))
    assert [e.reason for e in effects if isinstance(e, Reject)] == ["non_finite"]
    assert books(root) == before
