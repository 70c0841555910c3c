"""A child server comes back: both ends settle what each holds before anything else is said."""

from __future__ import annotations

import pytest

from halos.core.messages import (
    BlockRequest,
    Drain,
    Effect,
    Grant,
    Joined,
    MemberJoined,
    MemberLost,
    ParentLost,
    Push,
    PushAnswer,
    Resume,
    Resumed,
)
from halos.core.server import Server
from tests.core.builders import (
    finished,
    found,
    fragments,
    join_region,
    join_worker,
    meet_parent,
    only,
    push_of,
    receive,
    region_server,
    request_of,
    root_server,
    tell,
    torch_state,
    values,
    working_region,
)


@pytest.fixture
def root() -> Server:
    """Regions eu and us hold 0 to 100 and 100 to 200 of 200."""
    root = root_server(200, tensors=torch_state(10.0))
    for fence, name in enumerate(("eu", "us"), start=1):
        join_region(root, name, fence=fence)
        receive(root, name, request_of(1, 100, fence=fence))
    return root


class TestComingBack:
    def back(self, root: Server, **resume: object) -> tuple[Resumed, list[PushAnswer]]:
        given = {"fence": 9, "tenure": 1, "sequence": 1, "in_flight": True} | resume
        effects = join_region(root, "eu", **given)  # type: ignore[arg-type]
        return only(effects, Resumed, "eu"), found(effects, PushAnswer, "eu")

    def test_for_the_first_time_with_the_model_that_the_root_began_with(self) -> None:
        root = root_server(tensors=torch_state(10.0))
        resumed = only(join_region(root), Resumed)
        assert resumed == Resumed(1, 1, 0, reset=True, version=0, payload=None)

    def test_for_the_first_time_later(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        resumed = only(join_region(root, "ap", fence=3), Resumed)
        assert resumed.payload is not None
        assert (resumed.reset, resumed.version, values(resumed.payload)) == (True, 1, [9.0])

    def test_with_a_push_that_was_applied_it_gets_the_answer(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        receive(root, "us", push_of(1, 2.0, fence=2, contained=((100, 110),)))
        resumed, answers = self.back(root)
        assert (resumed.reset, resumed.sequence, resumed.fence) == (False, 1, 9)
        assert resumed.payload is not None
        assert (resumed.version, values(resumed.payload), answers) == (2, [7.0], [])

    def test_with_a_push_that_never_came_it_hears_so(self, root: Server) -> None:
        resumed, answers = self.back(root)
        assert (resumed.reset, resumed.sequence, answers) == (False, 0, [])
        effects = receive(root, "eu", push_of(1, 3.0, fence=9, contained=((0, 50),)))
        assert values(only(effects, PushAnswer).payload) == [7.0]

    def test_with_nothing_in_flight(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        resumed, answers = self.back(root, in_flight=False)
        assert (resumed.reset, resumed.sequence, answers) == (False, 1, [])

    def test_keeps_what_it_holds(self, root: Server) -> None:
        self.back(root)
        assert root.state.leasing.ledger.held["eu"].as_tuple() == ((0, 100),)

    @pytest.mark.parametrize(
        "resume",
        [
            {"tenure": 0, "sequence": 0, "in_flight": False},  # it lost its state
            {"tenure": 2},  # it knows a tenure that we never gave
            {"sequence": 5},  # it cut pushes that we never saw
            {"sequence": 0, "in_flight": False},  # it forgot pushes that we applied
            {"granted": 2},  # it has samples that we never granted
            {"pushed_under": 7},  # it forgot, and has cut another push of this number
        ],
    )
    def test_with_a_state_that_does_not_continue_it_starts_again(
        self, root: Server, resume: dict[str, int]
    ) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        resumed, answers = self.back(root, **resume)
        assert resumed.payload is not None
        assert (resumed.reset, values(resumed.payload), answers) == (True, [9.0], [])
        assert (resumed.tenure, resumed.sequence) == (max(1, resume.get("tenure", 1)) + 1, 1)
        held = root.state.leasing.ledger.held.get("eu")
        assert held is None
        assert root.leasing.state.ledger.returned[0].start == 10

    @pytest.mark.parametrize(("granted", "reset"), [(0, True), (1, False), (2, False), (3, True)])
    def test_one_grant_may_have_been_lost(self, granted: int, reset: bool) -> None:
        root = root_server(1000)
        join_region(root, "eu")
        for number in (1, 2):
            receive(root, "eu", request_of(number, 10))
        back = join_region(root, "eu", fence=2, tenure=1, granted=granted)
        assert only(back, Resumed).reset == reset

    def test_the_lost_grant_is_sent_again(self, root: Server) -> None:
        self.back(root, granted=0)
        again = only(receive(root, "eu", request_of(1, 100, fence=9)), Grant, "eu")
        assert [(b.start, b.end) for b in again.blocks] == [(0, 100)]
        assert again.fence == 9

    def test_after_losing_its_state_it_may_count_requests_from_the_start(
        self, root: Server
    ) -> None:
        receive(root, "us", request_of(2, 4, fence=2))  # waits: nothing is left
        self.back(root, tenure=0, sequence=0, in_flight=False)
        grant = only(receive(root, "eu", request_of(1, 50, fence=9)), Grant, "eu")
        assert [(b.start, b.end) for b in grant.blocks] == [(4, 54)]
        assert root.state.leasing.ledger.held["eu"].as_tuple() == ((4, 54),)

    def test_after_it_was_given_up_it_starts_again(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        tell(root, MemberLost("eu"))
        resumed, _ = self.back(root, in_flight=False)
        assert (resumed.reset, resumed.tenure > 1) == (True, True)

    def test_what_it_pushed_before_the_root_gave_it_up_stays_credited(self, root: Server) -> None:
        receive(root, "eu", push_of(1, 1.0, contained=((0, 10),)))
        tell(root, MemberLost("eu"))
        grant = only(receive(root, "us", request_of(2, 100, fence=2)), Grant)
        assert [(b.start, b.end) for b in grant.blocks] == [(10, 100)]

    def test_asks_once_a_session(self, root: Server) -> None:
        self.back(root)
        assert receive(root, "eu", Resume(9, 1, 1, True, 0, 1)) == []

    def test_gets_no_samples_before_that(self, root: Server) -> None:
        receive(root, "eu", request_of(2, 50))
        tell(root, MemberJoined("eu", "server", 9, ("text",)))
        assert not found(tell(root, MemberLost("us")), Grant)
        assert not found(receive(root, "eu", request_of(2, 50, fence=9)), Grant)

    def test_has_to_wait_until_there_is_a_model_to_hand_out(self) -> None:
        region = region_server(tensors=torch_state(0.0, parent=True))
        assert join_region(region, "rack") == []
        effects = meet_parent(region, version=3, payload=fragments(5.0))
        resumed = only(effects, Resumed, "rack")
        assert resumed.payload is not None and values(resumed.payload) == [5.0]


class TestTheChildsEnd:
    """nothing but `Resume` may be sent in a session before it is answered"""

    @pytest.fixture
    def region(self) -> Server:
        """K = 1, with a lease out and no stock left; the link was lost, and is back."""
        tensors = torch_state(10.0, parent=True)
        region, (assignment,) = working_region(4, tensors=tensors, accumulation=1)
        receive(region, "w0", finished(assignment, 1.0))  # is pushed
        tell(region, ParentLost())
        join_worker(region, "w1", fence=2)  # wants samples
        (resume,) = tell(region, Joined(2))
        assert found([resume], Resume) == [Resume(2, 1, 1, True, 0, 1, 1)]
        return region

    def resumed(self, region: Server) -> list[Effect]:
        return receive(region, "root", Resumed(2, 1, 0, False, 0, None))

    def test_only_then_it_pushes_and_asks(self, region: Server) -> None:
        assert receive(region, "root", Drain(2, 0)) == []
        effects = self.resumed(region)
        assert only(effects, Push, "root").sequence == 1
        assert only(effects, BlockRequest, "root").fence == 2

    def test_what_comes_between_is_cut_with_the_rest(self) -> None:
        region, assignments = working_region(
            1000, tensors=torch_state(10.0, parent=True), workers=2, accumulation=2
        )
        receive(region, "w0", finished(assignments[0], 1.0))
        tell(region, Joined(2))
        effects = receive(region, "w1", finished(assignments[1], 2.0))
        assert not found(effects, Push)
        push = only(self.resumed(region), Push)
        assert (push.sequence, values(push.payload)) == (1, [3.0])

    def test_a_repeated_answer_is_no_news(self, region: Server) -> None:
        self.resumed(region)
        assert self.resumed(region) == []

    def test_answers_of_an_earlier_session_are_no_news(self, region: Server) -> None:
        before = values(region.tensors.publish())
        assert receive(region, "root", PushAnswer(1, 1, 1, fragments(0.0))) == []
        assert receive(region, "root", Grant(1, 2, ())) == []
        assert receive(region, "root", Drain(1, 1)) == []
        assert values(region.tensors.publish()) == before
        assert region.state.push is not None
        assert region.state.leasing.request is not None

    def test_a_drain_that_an_open_grant_overtook_is_no_news(self) -> None:
        region, _ = working_region(4)
        assert region.state.leasing.granted == 1
        receive(region, "root", Drain(1, 0))
        assert not region.leasing.exhausted
        receive(region, "root", Drain(1, 1))
        assert region.leasing.exhausted
