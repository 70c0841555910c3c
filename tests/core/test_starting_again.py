"""A region whose state the parent does not know any more begins anew from the parent's model."""

from __future__ import annotations

import pytest

from halos.core.messages import (
    Assignment,
    BlockRequest,
    Effect,
    Push,
    PushAnswer,
    RaiseFence,
    Reject,
    Resumed,
)
from halos.core.samples import Report
from halos.core.server import Server
from tests.core.builders import (
    finished,
    found,
    fragments,
    give_samples,
    join_region,
    join_worker,
    meet_parent,
    only,
    receive,
    region_server,
    torch_state,
    values,
    working_region,
)


def rounds(region: Server, assignment: Assignment, count: int) -> tuple[Assignment, list[Effect]]:
    """Let the worker finish ``count`` rounds; its next assignment and all that came of them."""
    effects: list[Effect] = []
    for _ in range(count):
        latest = receive(region, "w0", finished(assignment, 1.0))
        assignment = only(latest, Assignment)
        effects += latest
    return assignment, effects


def answer(
    region: Server, sequence: int, *model: float, fence: int = 1, version: int = 1
) -> list[Effect]:
    return receive(region, "root", PushAnswer(sequence, fence, version, fragments(*model)))


def working(**settings: object) -> tuple[Server, Assignment]:
    """A region that pushes every 2 updates, with its worker on its first lease."""
    tensors = torch_state(10.0, parent=True)
    region, (first,) = working_region(tensors=tensors, **{"accumulation": 2, **settings})
    return region, first


class TestStartingAgain:
    @pytest.fixture
    def started_again(self) -> tuple[Server, Assignment, list[Effect]]:
        """It had a push in flight, work since and samples in stock; the parent took all back."""
        region, assignment = working(accumulation=2)
        assignment, _ = rounds(region, assignment, 3)
        effects = meet_parent(
            region, fence=2, tenure=2, sequence=1, version=9, payload=fragments(50.0)
        )
        return region, assignment, effects

    def test_takes_the_parents_model(
        self, started_again: tuple[Server, Assignment, list[Effect]]
    ) -> None:
        region, _, _ = started_again
        assert values(region.tensors.publish()) == [50.0]
        assert region.state.base_version == 9

    def test_drops_what_it_had(
        self, started_again: tuple[Server, Assignment, list[Effect]]
    ) -> None:
        region, assignment, effects = started_again
        assert not found(effects, Push)
        request = only(effects, BlockRequest, "root")
        assert (request.fence, request.number, request.need) == (2, 1, 4)
        late = receive(region, "w0", finished(assignment, 1.0))
        assert only(late, Reject, "w0").reason == "unknown_lease"
        assert answer(region, 1, 0.0, fence=2) == []
        assert values(region.tensors.publish()) == [50.0]

    def test_goes_on_with_new_samples_and_pushes_only_new_work(
        self, started_again: tuple[Server, Assignment, list[Effect]]
    ) -> None:
        region, _, _ = started_again
        assignment = only(give_samples(region, 600, 700), Assignment, "w0")
        assert values(assignment.payload) == [50.0]
        _, effects = rounds(region, assignment, 2)
        push = only(effects, Push)
        assert (push.sequence, push.fence, values(push.payload)) == (2, 2, [2.0])
        assert push.report == Report(2, 8, 80, 160.0, ((600, 608),))

    def test_new_leases_are_told_from_old_ones(
        self, started_again: tuple[Server, Assignment, list[Effect]]
    ) -> None:
        region, assignment, _ = started_again
        assert only(give_samples(region, 600, 700), Assignment).lease.id != assignment.lease.id

    def test_after_losing_its_state_it_counts_pushes_on_from_where_the_parent_is(self) -> None:
        region = region_server(tensors=torch_state(0.0, parent=True), accumulation=1)
        meet_parent(region, tenure=3, sequence=7, version=20, payload=fragments(1.0))
        join_worker(region)
        assignment = only(give_samples(region, 0, 100), Assignment)
        assert only(rounds(region, assignment, 1)[1], Push).sequence == 8

    def test_its_own_child_servers_start_again_too(self) -> None:
        region = region_server(tensors=torch_state(0.0, parent=True))
        meet_parent(region)
        join_region(region, "rack", fence=1)
        effects = meet_parent(region, fence=2, tenure=2, version=3, payload=fragments(1.0))
        assert found(effects, RaiseFence, "eu.members") == [RaiseFence("rack")]
        back = join_region(region, "rack", fence=2, tenure=1)
        resumed = only(back, Resumed, "rack")
        assert resumed.payload is not None
        assert (resumed.reset, values(resumed.payload)) == (True, [1.0])

    def test_the_first_time_it_keeps_its_model_and_its_children(self) -> None:
        region = region_server(tensors=torch_state(3.0, parent=True))
        join_worker(region)
        effects = meet_parent(region)
        assert not found(effects, RaiseFence)
        assert only(effects, BlockRequest).need == 4
        assert values(region.tensors.publish()) == [3.0]
