"""A driver's thread orders rounds, a loop's thread trains them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from halos.core.fragments import Fragments
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.core.samples import Lease
from halos.errors import Interrupted
from halos.runtime.handover import Handover

Order = Callable[[RunLocalSteps], "Future[LocalStepsDone]"]


def job(lease: str) -> RunLocalSteps:
    return RunLocalSteps(Lease(lease, "d", 0, ((0, 4),), 0), 1, 4, Fragments([torch.zeros(2)]))


def result(lease: str, loss: float = 1.0) -> LocalStepsDone:
    return LocalStepsDone(lease, 1, 4, loss, 1.0, 1.0, Fragments([torch.zeros(2)]))


@pytest.fixture
def handover() -> Handover:
    return Handover()


@pytest.fixture
def order(handover: Handover) -> Iterator[Order]:
    """Call the handover in a driver's thread."""
    pool = ThreadPoolExecutor(4)
    yield lambda job: pool.submit(handover, job)
    handover.close()
    pool.shutdown(wait=True)


def test_a_job_goes_there_and_its_result_comes_back(handover: Handover, order: Order) -> None:
    for lease in ("a", "b"):
        given, answer = job(lease), result(lease)
        waiting = order(given)
        assert handover.next() is given
        assert handover.wanted
        handover.done(answer)
        assert not handover.wanted
        assert waiting.result(10) is answer


def test_a_job_comes_again_until_it_is_done(handover: Handover, order: Order) -> None:
    given = job("a")
    waiting = order(given)
    assert handover.next() is handover.next() is given
    handover.done(result("a"))
    assert waiting.result(10).lease == "a"
    after = job("b")
    order(after)
    assert handover.next() is after


def test_the_loop_waits_for_a_job(handover: Handover, order: Order) -> None:
    with ThreadPoolExecutor(1) as loop:
        taken = loop.submit(handover.next)
        given = job("a")
        order(given)
        assert taken.result(10) is given


def test_a_failure_is_raised_where_the_job_came_from(handover: Handover, order: Order) -> None:
    waiting = order(job("a"))
    handover.next()
    handover.fail(ZeroDivisionError("in the loop"))
    with pytest.raises(ZeroDivisionError, match="in the loop"):
        waiting.result(10)


def test_a_job_given_up_in_training_does_not_confuse_the_next(
    handover: Handover, order: Order
) -> None:
    first = order(job("a"))
    handover.next()
    handover.give_up()
    with pytest.raises(Interrupted):
        first.result(10)
    assert not handover.wanted
    second = order(job("b"))
    handover.done(result("a"))  # of what it was given; too late
    handover.done(result("a"))
    assert handover.next().lease.id == "b"
    assert not second.done()
    handover.done(result("b"))
    assert second.result(10).lease == "b"


def test_one_lease_ordered_twice_is_two_jobs(handover: Handover, order: Order) -> None:
    """As after a restart of the server: the same samples from other parameters."""
    first = order(job("a"))
    handover.next()
    handover.give_up()
    second = order(job("a"))
    handover.done(result("a", loss=1.0))
    assert isinstance(first.exception(10), Interrupted)
    handover.next()
    handover.done(result("a", loss=2.0))
    assert second.result(10).loss == 2.0


def test_a_newer_job_takes_the_place_of_the_older(handover: Handover, order: Order) -> None:
    first = order(job("a"))
    handover.next()
    newer = job("b")
    second = order(newer)
    assert isinstance(first.exception(10), Interrupted)
    assert not handover.wanted
    assert handover.next() is newer
    handover.done(result("b"))
    assert second.result(10).lease == "b"


@pytest.mark.parametrize("finished", [True, False])
def test_closing_ends_both_sides(handover: Handover, order: Order, finished: bool) -> None:
    waiting = order(job("a"))
    handover.next()
    handover.close(finished=finished)
    with pytest.raises(Interrupted):
        waiting.result(10)
    with pytest.raises(Interrupted):
        handover(job("b"))
    assert not handover.wanted
    handover.done(result("a"))
    assert handover.next() is None
    assert handover.finished is finished
    handover.close()
    assert handover.finished is finished


def test_a_waiting_loop_is_woken_by_the_end(handover: Handover) -> None:
    with ThreadPoolExecutor(1) as loop:
        waiting = loop.submit(handover.next)
        handover.close(finished=True)
        assert waiting.result(10) is None


def test_why_a_run_ended_is_raised_in_the_loop(handover: Handover) -> None:
    handover.close(error=ValueError("of another run"))
    for _ in range(2):
        with pytest.raises(ValueError, match="of another run"):
            handover.next()


def test_a_signal_ends_a_loop_that_waits(handover: Handover) -> None:
    """The handler runs in the very thread that waits in ``next``."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGUSR1, lambda *_: handover.close())
    try:
        here = threading.get_ident()
        threading.Thread(target=signal.pthread_kill, args=(here, signal.SIGUSR1)).start()
        assert handover.next() is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_results_are_not_kept(handover: Handover, order: Order) -> None:
    """A job holds a whole model."""
    waiting = order(job("a"))
    handover.next()
    handover.done(result("a"))
    waiting.result(10)
    assert handover._newest is handover._taken is None
