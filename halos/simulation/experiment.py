"""Run one method in one environment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from halos.errors import UserError
from halos.runtime.dispatcher import Observer
from halos.simulation.environment import Environment
from halos.simulation.laboratory import Laboratory
from halos.simulation.methods import DataParallel, DiLoCo, Method, Quorum, Servers
from halos.simulation.outcome import Outcome
from halos.simulation.quorum import QuorumRun
from halos.simulation.synchronous import SynchronousRun
from halos.simulation.through_servers import ServersRun
from halos.simulation.world import Experiment, World

__all__ = ["Experiment", "check", "run_experiment"]


def check(environment: Environment, method: Method) -> None:
    """Raises ``UserError`` where the method cannot be simulated in this environment."""
    if environment.has_faults and not isinstance(method.settings, Servers):
        raise UserError(
            f"method {method.name}: cannot be simulated in {environment.name}, where machines or "
            "links fail; give a method of HALoS, or another environment"
        )


def run_experiment(
    experiment: Experiment,
    *,
    progress: Callable[[float], None] | None = None,
    stop: threading.Event | None = None,
    observers: Sequence[Observer] = (),
) -> Outcome:
    """Simulate to the end, or until ``stop`` is set: then the outcome is not ``finished``.

    ``progress`` hears of the share that is done, ``observers`` of each step of the core, which
    only methods with servers run on. Raises ``UserError`` for what :func:`check` refuses, and for
    data or models that cannot be had.
    """
    check(experiment.environment, experiment.method)
    specification = experiment.specification
    laboratory = Laboratory.of(specification) if specification is not None else None
    if laboratory is not None:
        laboratory.measure(laboratory.start, 0.0, 0, 0)
    world = World(experiment, laboratory, progress, stop or threading.Event())
    settings = experiment.method.settings
    match settings:
        case Servers():
            run = ServersRun(world, settings)
            run.clock.observers += observers
            return run.run()
        case DiLoCo() | DataParallel():
            return SynchronousRun(world, settings).run()
        case Quorum():
            return QuorumRun(world, settings).run()
