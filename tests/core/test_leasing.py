"""Which child gets how many samples, and when a server asks for more: events in, effects out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from halos.core.messages import Assignment, BlockRequest, Drain, Grant, MemberLost
from halos.core.samples import Block
from halos.core.server import Server
from tests.core.builders import (
    finished,
    found,
    give_samples,
    join_region,
    join_worker,
    meet_parent,
    only,
    receive,
    region_server,
    request_of,
    root_server,
    tell,
    working_region,
)


def ask(root: Server, number: int, need: int, want: int | None = None, *, who: str = "eu") -> Grant:
    fence = root.state.leasing.children[who].fence or 0
    return only(receive(root, who, request_of(number, need, want, fence=fence)), Grant, who)


def size(grant: Grant) -> int:
    return sum(block.end - block.start for block in grant.blocks)


class TestLeases:
    def test_are_a_round_of_consecutive_samples_from_one_counter(self) -> None:
        root = root_server(batch_size=64, local_steps_of={"w0": 3, "w1": 8}, local_steps=5)
        leases = [only(join_worker(root, f"w{i}", fence=i + 1), Assignment).lease for i in range(3)]
        assert [lease.ranges for lease in leases] == [((0, 192),), ((192, 704),), ((704, 1000),)]
        assert [lease.progress for lease in leases] == [0, 192, 704]

    def test_have_ids_that_are_never_used_again(self) -> None:
        region, (first,) = working_region()
        second = only(receive(region, "w0", finished(first)), Assignment)
        tell(region, MemberLost("w0"))
        third = only(join_worker(region, "w0", fence=2), Assignment)
        assert second.lease.ranges == third.lease.ranges
        assert len({first.lease.id, second.lease.id, third.lease.id}) == 3

    def test_the_last_one_is_of_what_is_left(self) -> None:
        root = root_server(6, batch_size=4, local_steps=1)
        first = only(join_worker(root), Assignment)
        last = only(receive(root, "w0", finished(first)), Assignment)
        assert (first.lease.samples, first.local_steps) == (4, 1)
        assert (last.lease.samples, last.local_steps) == (2, 1)

    def test_steps_follow_from_samples(self) -> None:
        root = root_server(20, batch_size=3, local_steps=5)
        assignment = only(join_worker(root), Assignment)
        assert (assignment.lease.samples, assignment.local_steps) == (15, 5)
        rest = only(join_worker(root, "w1", fence=2), Assignment)
        assert (rest.lease.samples, rest.local_steps, rest.batch_size) == (5, 2, 3)

    def test_are_cut_from_several_blocks(self) -> None:
        region = region_server()
        meet_parent(region)
        join_worker(region)
        request = region.state.leasing.request
        assert request is not None
        blocks = (Block("text", 0, 40, 43, 100), Block("text", 0, 80, 99, 120))
        effects = receive(region, "root", Grant(1, request.number, blocks))
        lease = only(effects, Assignment).lease
        assert lease.ranges == ((40, 43), (80, 81))
        assert (lease.samples, lease.progress, lease.origin) == (4, 100, 0)

    def test_wait_for_a_whole_round_while_more_may_come(self) -> None:
        region = region_server(lease_block=0)
        meet_parent(region)
        join_worker(region)
        short = give_samples(region, 0, 3)
        assert not found(short, Assignment)
        assert only(short, BlockRequest).need == 1
        assert only(give_samples(region, 3, 4), Assignment).lease.samples == 4

    def test_are_of_what_is_there_when_the_parent_has_no_more(self) -> None:
        region = region_server(lease_block=0)
        meet_parent(region)
        join_worker(region)
        give_samples(region, 0, 3)
        assert only(receive(region, "root", Drain(1, 1)), Assignment).lease.samples == 3

    def test_are_given_in_the_order_of_waiting(self) -> None:
        region = region_server(lease_block=0)
        meet_parent(region)
        for i in (2, 0, 1):
            join_worker(region, f"w{i}", fence=i + 1)
        effects = give_samples(region, 0, 4)
        effects += give_samples(region, 4, 12)
        assert [a.lease.id for a in found(effects, Assignment)] == ["w2/3/1", "w0/1/1", "w1/2/1"]
        assert [e.to for e in effects if found([e], Assignment)] == ["w2", "w0", "w1"]


class TestAskingTheParent:
    def test_for_each_round_when_it_is_due(self) -> None:
        """``lease_block = 0``, no prefetch (DESIGN 4, reference environment)"""
        region = region_server(lease_block=0)
        assert not found(meet_parent(region), BlockRequest)
        assert only(join_worker(region), BlockRequest) == BlockRequest(1, 1, 4, 4)
        first = only(give_samples(region, 0, 4), Assignment)
        assert only(receive(region, "w0", finished(first)), BlockRequest).need == 4

    @pytest.mark.parametrize(("seconds_a_round", "expected"), [(1.0, 4 * 30), (3.0, 4 * 10)])
    def test_ahead_of_need_by_what_a_horizon_used(
        self, seconds_a_round: float, expected: int
    ) -> None:
        region, (assignment,) = working_region(200, lease_horizon_s=30.0)
        in_stock: list[float] = []
        for i in range(200):
            now = i * seconds_a_round
            effects = receive(region, "w0", finished(assignment), now=now)
            assignment = only(effects, Assignment)
            for request in found(effects, BlockRequest):
                in_stock.append(request.want + region.leasing.state.ledger.available())
                give_samples(region, 1000 * i, 1000 * i + request.want, now=now)
        assert in_stock[-1] == pytest.approx(expected, rel=0.1)

    def test_at_least_a_rounds_worth_ahead(self) -> None:
        region, assignments = working_region(16, workers=2, lease_horizon_s=1.0)
        effects = receive(region, "w0", finished(assignments[0]), now=100.0)
        # 4 samples are left, which is all that the last second used, but half a round of two
        assert only(effects, BlockRequest).want == 4

    def test_one_request_at_a_time_which_grows_with_the_need(self) -> None:
        region = region_server(lease_block=0)
        meet_parent(region)
        assert only(join_worker(region, "w0"), BlockRequest) == request_of(1, 4)
        assert only(join_worker(region, "w1", fence=2), BlockRequest) == request_of(1, 8)
        assert not found(join_worker(region, "w1", fence=3), BlockRequest)
        assert only(give_samples(region, 0, 4), BlockRequest).number == 2

    def test_not_while_the_stock_lasts(self) -> None:
        region, (assignment,) = working_region(1000, lease_block=100)
        requests = []
        for _ in range(240):
            effects = receive(region, "w0", finished(assignment))
            assignment = only(effects, Assignment)
            requests += found(effects, BlockRequest)
        # half a block is left when it asks
        assert [request.want for request in requests] == [100 - 48]
        assert region.leasing.state.ledger.available() == 1000 - 4 * 241

    def test_not_before_there_is_anybody_to_give_them_to(self) -> None:
        region = region_server(lease_block=100)
        assert not found(meet_parent(region), BlockRequest)
        assert only(join_worker(region), BlockRequest).want == 104

    @pytest.mark.parametrize("number", [1, 99])
    def test_an_answer_to_another_request_is_not_taken_in(self, number: int) -> None:
        region, _ = working_region(4)
        assert region.state.leasing.request is not None
        receive(region, "root", Grant(1, number, (Block("text", 0, 500, 600, 0),)))
        assert region.leasing.state.ledger.available() == 0


class TestGranting:
    @pytest.fixture
    def root(self) -> Server:
        root = root_server(1000)
        join_region(root, "eu", fence=1)
        join_region(root, "us", fence=2)
        return root

    def test_gives_what_is_wanted(self, root: Server) -> None:
        grant = ask(root, 1, need=4, want=40)
        assert grant.blocks == (Block("text", 0, 0, 40, 0),)
        assert ask(root, 2, need=4, want=10).blocks == (Block("text", 0, 40, 50, 40),)

    def test_a_block_has_one_owner(self, root: Server) -> None:
        spans: list[tuple[int, int]] = []
        for i in range(1, 300):
            for fence, who in enumerate(("eu", "us"), start=1):
                effects = receive(root, who, request_of(i, 1, 40, fence=fence))
                spans += [(b.start, b.end) for g in found(effects, Grant, who) for b in g.blocks]
        assert (spans[0][0], spans[-1][1]) == (0, 1000)
        assert all(a[1] == b[0] for a, b in pairwise(spans))

    def test_ahead_of_need_at_most_half_an_equal_share_of_the_rest(self, root: Server) -> None:
        assert size(ask(root, 1, need=4, want=900)) == 1000 // 4
        assert size(ask(root, 1, need=4, want=900, who="us")) == 750 // 4
        assert size(ask(root, 2, need=4, want=900)) == 563 // 4

    def test_never_less_than_the_need(self, root: Server) -> None:
        assert size(ask(root, 1, need=900, want=900)) == 900
        assert size(ask(root, 1, need=90, want=900, who="us")) == 90

    def test_near_the_end_a_rounds_worth_at_a_time(self, root: Server) -> None:
        ask(root, 1, need=991, want=991)
        assert size(ask(root, 1, need=1, want=900, who="us")) == 4
        assert size(ask(root, 2, need=3, want=3)) == 3
        assert size(ask(root, 2, need=1, want=900, who="us")) == 2

    def test_a_run_without_end_gives_all_that_is_wanted(self) -> None:
        root = root_server(None)
        join_region(root)
        assert size(ask(root, 1, need=0, want=10**9)) == 10**9

    def test_a_repeated_request_gets_the_same_grant(self, root: Server) -> None:
        first = ask(root, 1, need=4, want=40)
        assert ask(root, 1, need=4, want=40) == first
        assert root.leasing.state.ledger.progress == 40

    def test_an_older_request_gets_nothing(self, root: Server) -> None:
        ask(root, 1, need=4)
        ask(root, 2, need=4)
        assert receive(root, "eu", request_of(1, 4)) == []

    def test_who_asks_when_nothing_is_left_is_told_and_waits(self, root: Server) -> None:
        ask(root, 1, need=1000)
        effects = receive(root, "us", request_of(1, 4, fence=2))
        assert only(effects, Drain, "us").fence == 2

    def test_who_waits_gets_what_comes_back(self, root: Server) -> None:
        ask(root, 1, need=1000)
        receive(root, "us", request_of(1, 4, fence=2))
        effects = tell(root, MemberLost("eu"))
        assert only(effects, Grant, "us").blocks == (Block("text", 0, 0, 4, 1000),)

    def test_who_asks_for_more_meanwhile_gets_more(self, root: Server) -> None:
        ask(root, 1, need=1000)
        for need in (4, 20, 8):  # the last one was overtaken by the one before
            receive(root, "us", request_of(1, need, fence=2))
        assert size(only(tell(root, MemberLost("eu")), Grant, "us")) == 20
