"""Between a driver, which orders rounds in a thread of its own, and a loop that trains them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.errors import Interrupted


@dataclass(eq=False)
class _Order:
    """One call of the driver; the first outcome counts."""

    job: RunLocalSteps
    outcome: LocalStepsDone | BaseException | None = None


class Handover:
    """A trainer for a driver: each call blocks until the loop in another thread has done the job.

    The driver calls it, :meth:`give_up` and :meth:`close`; the loop calls :meth:`next`,
    :attr:`wanted`, :meth:`done` and :meth:`fail`. All are safe in any thread, and in a signal
    handler.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._newest: _Order | None = None
        self._taken: _Order | None = None  # what the loop works on
        self._closed = False
        self._finished = False
        self._error: Exception | None = None

    # ------------------------------------------------------------ the driver's side

    def __call__(self, job: RunLocalSteps) -> LocalStepsDone:
        """The loop's result of ``job``, or the error that the loop failed with.

        Raises :class:`Interrupted` when the job is given up, when another takes its place, and
        once this is closed: then the round never was.
        """
        order = _Order(job)
        with self._changed:
            if self._closed:
                raise Interrupted(job.lease.id)
            self.give_up()
            self._newest = order
            self._changed.notify_all()
            self._changed.wait_for(lambda: order.outcome is not None)
            if self._newest is order:
                self._newest = None  # it holds a whole model
        if isinstance(order.outcome, LocalStepsDone):
            return order.outcome
        assert order.outcome is not None
        raise order.outcome

    def give_up(self) -> None:
        """The result of the job that is out, if any, is no longer wanted."""
        if self._newest is not None:
            self._settle(self._newest, Interrupted(self._newest.job.lease.id))

    def close(self, *, finished: bool = False, error: Exception | None = None) -> None:
        """There are no more jobs: the run is over (``finished``), or this process leaves it.

        ``error`` is why, if it is to be raised in the loop.
        """
        with self._changed:
            self._closed = True
            self._finished = self._finished or finished
            self._error = self._error or error
            self.give_up()
            self._changed.notify_all()

    # ------------------------------------------------------------ the loop's side

    def next(self) -> RunLocalSteps | None:
        """The job that is to be done now, once there is one; ``None`` once this is closed.

        The same one again until :meth:`done` or :meth:`fail`: a round may be begun again.
        Raises the error that this was closed with.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._open)
            if self._error is not None:
                raise self._error
            self._taken = None if self._closed else self._newest
            return self._taken.job if self._taken is not None else None

    @property
    def wanted(self) -> bool:
        """Whether the result of the job that :meth:`next` gave last is still waited for."""
        return self._taken is not None and self._taken.outcome is None

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self._finished

    @property
    def closed(self) -> bool:
        return self._closed

    def done(self, result: LocalStepsDone) -> None:
        """Of the job that :meth:`next` gave last; of no effect if that was given up since."""
        self._answer(result)

    def fail(self, error: BaseException) -> None:
        """The job cannot be done: the driver's call raises ``error``."""
        self._answer(error)

    def _answer(self, outcome: LocalStepsDone | BaseException) -> None:
        if self._taken is not None:
            self._settle(self._taken, outcome)
            self._taken = None

    @property
    def _open(self) -> bool:
        return self._newest is not None and self._newest.outcome is None

    def _settle(self, order: _Order, outcome: LocalStepsDone | BaseException) -> None:
        with self._changed:
            if order.outcome is None:
                order.outcome = outcome
                self._changed.notify_all()
