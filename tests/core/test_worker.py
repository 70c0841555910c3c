"""The worker loses no finished update and trains no lease twice: events in, effects out."""

from __future__ import annotations

import pytest

from halos.core.messages import (
    Assignment,
    Effect,
    FenceStale,
    Finish,
    Joined,
    LocalStepsDone,
    ParentLost,
    Ready,
    Receipt,
    Refused,
    RunLocalSteps,
    RunOver,
    Stop,
    WorkerUpdate,
)
from halos.core.samples import Lease
from halos.core.tensors import NOTHING, RefusalReason
from halos.core.worker import Worker
from tests.core.builders import found, only, receive, tell


def assignment(number: int, *, fence: int = 1, answers: str | None = None) -> Assignment:
    lease = Lease(f"eu/1/{number}", "text", 0, ((4 * number, 4 * number + 4),), 4 * number)
    return Assignment(number, fence, answers, lease, 4, 1, 10 + number, NOTHING)


def result(number: int) -> LocalStepsDone:
    return LocalStepsDone(f"eu/1/{number}", 4, 40, 2.5, 0.5, 3.0, NOTHING)


def training(number: int = 1) -> Worker:
    worker = Worker("w", "eu")
    tell(worker, Joined(1))
    receive(worker, "eu", assignment(number))
    return worker


def waiting_for_answer(number: int = 1) -> Worker:
    worker = training(number)
    worker.handle(result(number), now=0.0)
    return worker


def test_asks_for_work_when_it_joined() -> None:
    assert found(tell(Worker("w", "eu"), Joined(3)), Ready, "eu") == [Ready(3, None)]


def test_trains_what_it_is_assigned() -> None:
    worker = Worker("w", "eu")
    tell(worker, Joined(1))
    given = assignment(1)
    expected = RunLocalSteps(given.lease, 4, 1, given.payload)
    assert receive(worker, "eu", given) == [expected]


def test_sends_the_result_of_its_round() -> None:
    effects = training().handle(result(1), now=0.0)
    assert found(effects, WorkerUpdate, "eu") == [
        WorkerUpdate(
            lease="eu/1/1",
            fence=1,
            base_version=11,
            local_steps=4,
            tokens=40,
            loss=2.5,
            norm=0.5,
            seconds=3.0,
            payload=NOTHING,
        )
    ]


def test_goes_on_with_the_next_lease() -> None:
    worker = waiting_for_answer()
    effects = receive(worker, "eu", assignment(2, answers="eu/1/1"))
    assert only(effects, RunLocalSteps).lease.id == "eu/1/2"
    assert worker.state.finished is None


class TestRepeatsAndStrays:
    def test_a_repeated_assignment_does_not_train_again(self) -> None:
        assert receive(training(), "eu", assignment(1)) == []
        assert receive(waiting_for_answer(), "eu", assignment(1)) == []

    def test_an_older_assignment_is_ignored(self) -> None:
        worker = training(2)
        assert receive(worker, "eu", assignment(1)) == []
        effects = worker.handle(result(2), now=0.0)
        assert only(effects, WorkerUpdate).lease == "eu/1/2"

    def test_an_assignment_of_an_earlier_fence_is_ignored(self) -> None:
        worker = Worker("w", "eu")
        tell(worker, Joined(1))
        tell(worker, Joined(2))
        assert receive(worker, "eu", assignment(1, fence=1)) == []
        assert found(receive(worker, "eu", assignment(1, fence=2)), RunLocalSteps)

    def test_the_result_of_a_lease_that_was_replaced_is_forgotten(self) -> None:
        worker = training()
        receive(worker, "eu", assignment(2))
        assert worker.handle(result(1), now=0.0) == []
        assert found(worker.handle(result(2), now=0.0), WorkerUpdate)

    def test_a_new_server_may_count_from_the_start(self) -> None:
        worker = training(7)
        tell(worker, ParentLost())
        tell(worker, Joined(1))
        assert found(receive(worker, "eu", assignment(1)), RunLocalSteps)


class TestOutage:
    def test_goes_on_training_and_keeps_the_result(self) -> None:
        worker = training()
        tell(worker, ParentLost())
        assert worker.handle(result(1), now=0.0) == []
        effects = tell(worker, Joined(2))
        assert only(effects, WorkerUpdate, "eu").lease == "eu/1/1"
        assert only(effects, WorkerUpdate).fence == 2
        assert not found(effects, Ready)

    def test_sends_again_what_nobody_acknowledged(self) -> None:
        worker = waiting_for_answer()
        first = tell(worker, Joined(2))
        second = tell(worker, Joined(3))
        assert only(first, WorkerUpdate).lease == only(second, WorkerUpdate).lease == "eu/1/1"

    def test_says_which_lease_it_trains_on(self) -> None:
        worker = training()
        tell(worker, ParentLost())
        assert only(tell(worker, Joined(2)), Ready) == Ready(2, "eu/1/1")

    def test_a_receipt_ends_the_repeating(self) -> None:
        worker = waiting_for_answer()
        assert receive(worker, "eu", Receipt(1, "eu/1/1")) == []
        assert only(tell(worker, Joined(2)), Ready) == Ready(2, None)

    def test_a_receipt_for_another_lease_does_not(self) -> None:
        worker = waiting_for_answer(2)
        receive(worker, "eu", Receipt(1, "eu/1/1"))
        assert found(tell(worker, Joined(2)), WorkerUpdate)


class TestRefusals:
    @pytest.mark.parametrize("reason", ["fenced", "unknown_sender"])
    def test_a_stale_fence_keeps_the_update_and_joins_again(self, reason: RefusalReason) -> None:
        worker = waiting_for_answer()
        effects = receive(worker, "eu", Refused(reason, "eu/1/1", 1, "join again"))
        assert found(effects, FenceStale, "w.session")
        assert found(tell(worker, Joined(2)), WorkerUpdate)

    def test_of_an_earlier_fence_is_no_news(self) -> None:
        worker = waiting_for_answer()
        tell(worker, Joined(2))
        assert receive(worker, "eu", Refused("fenced", "eu/1/1", 1, "join again")) == []

    @pytest.mark.parametrize("reason", ["non_finite", "wrong_shape", "unknown_lease"])
    def test_of_the_update_itself_gives_it_up(self, reason: RefusalReason) -> None:
        worker = waiting_for_answer()
        assert receive(worker, "eu", Refused(reason, "eu/1/1", 1, "not applied")) == []
        assert only(tell(worker, Joined(2)), Ready) == Ready(2, None)


def test_stops_when_told_and_stays_so() -> None:
    worker = training()
    effects: list[Effect] = receive(worker, "eu", Stop())
    assert found(effects, RunOver, "w.session") and found(effects, Finish)
    assert worker.handle(result(1), now=0.0) == []
    assert tell(worker, Joined(2)) == []
