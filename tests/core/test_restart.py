"""Processes that start again from saved state: events in, effects out."""

from __future__ import annotations

import pytest

from halos.core.membership import Identity, Membership, MembershipSettings, Session
from halos.core.messages import (
    DeadlineReached,
    Finish,
    Heartbeat,
    Join,
    Joined,
    LinkLost,
    LocalStepsDone,
    MemberAway,
    MemberExpected,
    MemberLost,
    Push,
    Ready,
    Reject,
    RunOver,
    Started,
    Stop,
    Welcome,
    WorkerUpdate,
)
from halos.core.server import Server
from halos.core.tensors import NOTHING
from halos.core.worker import Worker
from tests.core.builders import (
    finished,
    found,
    join_region,
    join_worker,
    meet_parent,
    only,
    push_of,
    receive,
    request_of,
    root_server,
    sent,
    tell,
    working_region,
)
from tests.core.test_worker import training, waiting_for_answer

JOIN = Join("worker", "run", "m", ("a",))


class TestServer:
    @pytest.fixture
    def root(self) -> Server:
        """A root that saw a worker on a lease and a region with samples, and started again."""
        root = root_server(1000)
        join_worker(root, "w0", fence=1)
        join_region(root, "eu", fence=2)
        receive(root, "eu", request_of(1, 100, fence=2))
        return root

    def test_expects_its_children_back(self, root: Server) -> None:
        effects = root.handle(Started(), now=50.0)
        assert found(effects, MemberExpected, "root.members") == [
            MemberExpected("w0", "worker"),
            MemberExpected("eu", "server"),
        ]

    def test_lets_nobody_in_before_he_joined_again(self, root: Server) -> None:
        root.handle(Started(), now=50.0)
        refused = receive(root, "eu", push_of(1, 1.0, fence=2, contained=((4, 14),)))
        refused += receive(root, "w0", Ready(1, None))
        assert [r.reason for r in found(refused, Reject)] == ["fenced", "fenced"]

    def test_goes_on_with_what_everybody_held(self, root: Server) -> None:
        lease = root.state.leasing.children["w0"].lease
        assert lease is not None
        root.handle(Started(), now=50.0)
        assert join_worker(root, "w0", fence=3, lease=lease.id) == []
        join_region(root, "eu", fence=4, tenure=1, granted=1)
        receive(root, "eu", push_of(1, 1.0, fence=4, contained=((4, 104),)))
        assert root.state.leasing.ledger.credited.as_tuple() == ((4, 104),)

    def test_counts_patience_on_the_new_clock(self) -> None:
        root = root_server(200, drain_timeout_s=300)
        for fence, name in enumerate(("eu", "us"), start=1):
            join_region(root, name, fence=fence)
            receive(root, name, request_of(1, 100, fence=fence))
        receive(root, "us", request_of(2, 4, fence=2), now=9000.0)
        root.handle(Started(), now=5.0)
        assert root.next_deadline() is None
        join_region(root, "us", fence=3, tenure=1, granted=1, now=6.0)  # it waits still
        assert root.next_deadline() == 306.0

    def test_a_region_sends_nothing_before_its_parent_let_it_in(self) -> None:
        region, (assignment,) = working_region(1000, accumulation=1)
        region.handle(Started(), now=0.0)
        join_worker(region, "w0", fence=5, lease=assignment.lease.id)
        effects = receive(region, "w0", finished(assignment, fence=5))
        assert not found(effects, Push)
        assert only(meet_parent(region, fence=9, reset=False), Push).fence == 9

    def test_after_the_end_it_says_so_again(self, root: Server) -> None:
        region, _ = working_region()
        receive(region, "root", Stop())
        effects = region.handle(Started(), now=0.0)
        assert found(effects, Finish)
        assert found(effects, RunOver, "eu.members") and found(effects, RunOver, "eu.session")
        assert sent(receive(region, "w0", Ready(9, None)), Stop).keys() == {"w0"}


class TestMembership:
    SETTINGS = MembershipSettings(heartbeat_interval_s=5, heartbeat_timeout_s=30)

    @pytest.fixture
    def members(self) -> Membership:
        node = Membership("eu", Identity(run="run", model="m", datasets=("a",)), self.SETTINGS)
        receive(node, "w.session", JOIN)
        return node

    def test_a_fence_is_never_issued_twice(self, members: Membership) -> None:
        """even by a server that forgot all that it issued before"""
        fresh = Membership("eu", members.identity, self.SETTINGS)
        fences = []
        for node, epoch in ((members, 1), (members, 2), (fresh, 3)):
            node.handle(Started(epoch), now=0.0)
            fences += [only(receive(node, "w.session", JOIN), Welcome).fence for _ in range(3)]
        assert fences == sorted(set(fences))

    def test_sessions_are_over(self, members: Membership) -> None:
        members.handle(Started(1), now=0.0)
        assert only(receive(members, "w.session", Heartbeat(1)), Reject).reason == "fenced"

    @pytest.mark.parametrize(
        ("role", "told"), [("worker", MemberLost("x")), ("server", MemberAway("x"))]
    )
    def test_who_does_not_come_back_is_given_up(
        self, members: Membership, role: str, told: object
    ) -> None:
        tell(members, MemberExpected("x", role), now=100.0)  # type: ignore[arg-type]
        members.state.members.pop("w")
        assert members.next_deadline() == 130.0
        effects = members.handle(DeadlineReached(), now=130.0)
        assert found(effects, type(told), "eu") == [told]
        assert not found(effects, Reject)  # there is nobody to tell

    def test_who_is_back_already_is_not_expected(self, members: Membership) -> None:
        tell(members, MemberExpected("w", "worker"), now=100.0)
        assert receive(members, "w.session", Heartbeat(1), now=1.0)
        assert members.next_deadline() == 31.0

    def test_a_name_stays_with_its_role(self, members: Membership) -> None:
        other = receive(members, "w.session", Join("server", "run", "m", ("a",)))
        assert only(other, Reject).reason == "wrong_role"
        assert receive(members, "w.session", Heartbeat(1)) != []


class TestSession:
    def over(self) -> Session:
        node = Session("w", "eu", JOIN, MembershipSettings())
        node.handle(Started(), now=0.0)
        tell(node, RunOver())
        return node

    def test_after_the_end_it_does_not_join_again(self) -> None:
        assert self.over().handle(Started(), now=9.0) == [Finish()]

    def test_after_the_end_a_lost_link_is_no_news(self) -> None:
        assert self.over().handle(LinkLost(), now=9.0) == []


class TestWorker:
    def test_forgets_the_round_that_ended_with_it(self) -> None:
        worker = training()
        worker.handle(Started(), now=0.0)
        assert found(tell(worker, Joined(2)), Ready) == [Ready(2, None)]
        done = LocalStepsDone("eu/1/1", 4, 40, 2.5, 0.5, 3.0, NOTHING)
        assert worker.handle(done, now=0.0) == []

    def test_keeps_the_result_that_nobody_acknowledged(self) -> None:
        worker = waiting_for_answer()
        worker.handle(Started(), now=0.0)
        assert only(tell(worker, Joined(2)), WorkerUpdate).fence == 2

    def test_after_the_end_it_says_so_again(self) -> None:
        worker = Worker("w", "eu")
        receive(worker, "eu", Stop())
        effects = worker.handle(Started(), now=0.0)
        assert found(effects, Finish) and found(effects, RunOver, "w.session")
