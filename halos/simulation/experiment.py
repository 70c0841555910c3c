"""Run one method in one environment."""

from __future__ import annotations

import threading
from collections.abc import Callable

from halos.errors import UserError
from halos.simulation.laboratory import Laboratory
from halos.simulation.methods import DataParallel, DiLoCo, Quorum, Servers
from halos.simulation.outcome import Outcome
from halos.simulation.quorum import QuorumRun
from halos.simulation.synchronous import SynchronousRun
from halos.simulation.through_servers import ServersRun
from halos.simulation.world import Experiment, World

__all__ = ["Experiment", "run_experiment"]


def run_experiment(
    experiment: Experiment,
    *,
    progress: Callable[[float], None] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Simulate to the end, or until ``stop`` is set: then the outcome is not ``finished``.

    ``progress`` hears of the share that is done. Raises ``UserError`` where the method cannot be
    simulated in this environment, and for data or models that cannot be had.
    """
    settings = experiment.method.settings
    environment = experiment.environment
    if environment.has_faults and not isinstance(settings, Servers):
        raise UserError(
            f"method {experiment.method.name}: cannot be simulated in {environment.name}, where "
            "machines or links fail; give a method of HALoS, or another environment"
        )
    specification = experiment.specification
    laboratory = Laboratory.of(specification) if specification is not None else None
    world = World(experiment, laboratory, progress, stop or threading.Event())
    match settings:
        case Servers():
            return ServersRun(world, settings).run()
        case DiLoCo() | DataParallel():
            return SynchronousRun(world, settings).run()
        case Quorum():
            return QuorumRun(world, settings).run()
