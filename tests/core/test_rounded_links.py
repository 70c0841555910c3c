"""Links between servers that round: no push and no model loses anything for good (DESIGN 6)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halos.core.fragments import Fragments
from halos.core.membership import session_of
from halos.core.messages import FenceStale, Joined, Push, PushAnswer, Resume, Resumed, Tell
from halos.core.server import Server
from halos.core.state import Roundings, TorchState
from tests.core.builders import (
    PLAIN,
    finished,
    fragments,
    only,
    receive,
    tell,
    values,
    working_region,
)


def to_whole(tensor: Tensor) -> Tensor:
    return tensor.round()


COARSE = Roundings(push=to_whole, difference=to_whole)


def state(*theta: float, links: Roundings = COARSE) -> TorchState:
    return TorchState.start(fragments(*theta), PLAIN, links, has_parent=True)


def owing(lost: float) -> TorchState:
    """A child whose only push was answered, and lost all that it carried."""
    child = state(0.0)
    child.apply(fragments(lost))
    child.cut()
    child.blend(child.publish(), merge_weight=1.0, carry=False)
    return child


def arrived(payload: Fragments) -> list[float]:
    return [round(x) for x in values(payload)]


class TestPushes:
    def test_what_one_loses_is_in_the_next(self) -> None:
        child, sums = state(0.0, 0.0), [0.0, 0.0]
        for number in range(1, 41):
            child.apply(fragments(0.3, -1.25))
            sums = [a + b for a, b in zip(sums, arrived(child.cut()), strict=True)]
            child.blend(child.publish(), merge_weight=1.0, carry=False)
            for total, true in zip(sums, (0.3 * number, -1.25 * number), strict=True):
                assert abs(total - true) <= 0.5 + 1e-9

    def test_of_one_that_never_arrived_nothing_was_lost(self) -> None:
        child = owing(0.25)
        child.apply(fragments(1.0))
        assert values(child.cut()) == [1.25]
        child.apply(fragments(2.0))
        assert values(child.cut()) == [3.25]  # cut again, under the same number

    def test_what_is_to_be_made_up_for_is_kept_over_a_restart(self) -> None:
        child = owing(0.25)
        child.apply(fragments(0.375))
        child.cut()
        parts = {name: part.copy() for name, part in child.capture().items()}
        for again in (child, TorchState.restore(parts, PLAIN, COARSE, step=2)):
            again.blend(fragments(5.0), merge_weight=1.0, carry=False)
            assert values(again.cut()) == [0.625 - 1.0]

    def test_links_that_became_exact_send_it_once(self) -> None:
        child = owing(0.25)
        exact = TorchState.restore(child.capture(), PLAIN, step=1)
        assert values(exact.cut()) == [0.25]
        exact.blend(exact.publish(), merge_weight=1.0, carry=False)
        assert values(exact.cut()) == [0.0]
        assert "lost" not in exact.capture()

    def test_who_starts_again_has_nothing_to_make_up_for(self) -> None:
        child = owing(0.25)
        child.adopt(fragments(7.0))
        assert values(child.cut()) == [0.0]


class TestModels:
    def test_the_first_comes_whole_and_then_what_it_differs_by(self) -> None:
        parent, child = state(0.4), state(0.0)
        model, against = parent.answer("eu", child.holds())
        assert (values(model), against) == ([0.4], None)
        assert child.whole(model, None) is model
        parent.apply(fragments(-3.2))
        difference, against = parent.answer("eu", child.holds())
        assert against == child.holds()
        assert values(difference) == [3.6 - 0.4]
        got = child.whole(Fragments([to_whole(t) for t in difference.tensors]), against)
        assert got is not None
        assert values(got) == [3.4]

    @settings(deadline=None)
    @given(
        st.lists(st.tuples(st.floats(-9, 9), st.sampled_from(["arrives", "lost", "restarts"]))),
    )
    def test_whatever_is_lost_both_ends_come_to_hold_the_same(
        self, rounds: list[tuple[float, str]]
    ) -> None:
        parent, child = state(0.0, 1.0), state(0.0, 1.0)
        for change, fate in [*rounds, (1.7, "arrives"), (0.1, "arrives")]:
            parent.apply(fragments(change, -change))
            payload, against = parent.answer("eu", child.holds())
            came = payload
            if against is not None:
                came = Fragments([to_whole(t) for t in payload.tensors])
            if fate == "restarts":
                child = state(0.0, 1.0)
            elif fate == "arrives":
                model = child.whole(came, against)
                assert model is not None
                off = zip(values(model), values(parent.publish()), strict=True)
                assert all(abs(a - b) <= 0.5 + 1e-9 for a, b in off)
        assert child.shadow is not None
        mine, theirs = child.shadow.content, parent.shadows["eu"].content
        assert all(map(torch.equal, mine, theirs))
        assert child.holds() == parent.shadows["eu"].number

    def test_a_difference_to_what_is_not_held_is_no_model(self) -> None:
        child = state(0.0)
        assert child.whole(fragments(1.0), 12345) is None
        child.whole(fragments(4.0), None)
        holds = child.holds()
        assert holds is not None
        assert child.whole(fragments(1.0), holds + 1) is None
        assert child.holds() == holds

    def test_exact_links_keep_no_shadow(self) -> None:
        parent = state(0.0, links=Roundings())
        parent.answer("eu", None)
        parent.whole(fragments(1.0), None)
        assert (parent.shadow, parent.shadows, parent.holds()) == (None, {}, None)

    def test_shadows_are_kept_over_a_restart(self) -> None:
        parent, child = state(0.0), state(0.0)
        child.whole(parent.answer("eu", None)[0], None)
        parts = {name: part.copy() for name, part in parent.capture().items()}
        again = TorchState.restore(parts, PLAIN, COARSE, step=0)
        again.apply(fragments(-2.0))
        assert again.answer("eu", child.holds())[1] == child.holds()
        mine = TorchState.restore(child.capture(), PLAIN, COARSE, step=0)
        assert mine.holds() == child.holds()


def test_a_server_that_cannot_use_a_difference_asks_for_the_whole_model() -> None:
    """As damage to its memory would make it: it joins again, and a session begins whole."""
    region, (first,) = working_region(tensors=state(10.0), accumulation=1)
    assert isinstance(region, Server)
    push = only(receive(region, "w0", finished(first, 1.0)), Push, "root")
    assert push.holds is None
    wrong = PushAnswer(push.sequence, push.fence, 1, fragments(1.0), against=99)
    assert receive(region, "root", wrong) == [Tell(session_of(region.name), FenceStale())]
    assert region.state.push is not None  # not answered yet
    resume = only(tell(region, Joined(2)), Resume, "root")
    assert (resume.sequence, resume.in_flight) == (push.sequence, True)
    back = Resumed(resume.fence, region.state.tenure, push.sequence, False, 1, fragments(3.0))
    receive(region, "root", back)
    assert region.state.push is None
    assert isinstance(region.tensors, TorchState)
    assert region.tensors.shadow is not None
