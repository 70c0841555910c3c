"""Events and effects are shared by all who see them: nobody changes one, though anybody could."""

from __future__ import annotations

from halos.core.messages import Effect, Event
from halos.runtime.dispatcher import Step
from tests.simulation.test_faults import FAULTS, Faulty


def test_no_step_changes_what_an_earlier_one_was_given_or_asked_for() -> None:
    run = Faulty(seed=3)
    seen: list[tuple[Event | Effect, str]] = []

    def keep(step: Step) -> None:
        seen.extend((each, repr(each)) for each in (step.event, *step.effects))

    run.clock.observers.append(keep)
    for fault in FAULTS * 2:
        run.suffer(fault)
    assert len(seen) > 1_000
    assert all(repr(each) == before for each, before in seen)
