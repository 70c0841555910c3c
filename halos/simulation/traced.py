"""A simulated run that writes down all that happens, in the form of every other driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from halos.errors import UserError
from halos.runtime.trace import TraceWriter
from halos.simulation.experiment import Experiment
from halos.simulation.laboratory import Laboratory
from halos.simulation.methods import Servers
from halos.simulation.outcome import Outcome
from halos.simulation.through_servers import ServersRun
from halos.simulation.world import World


def run_traced(
    experiment: Experiment,
    path: Path,
    *,
    progress: Callable[[float], None] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """As ``run_experiment``, and every event on a line of ``path``.

    Raises ``UserError`` also where the method does not run on the core, which alone has events.
    """
    settings = experiment.method.settings
    if not isinstance(settings, Servers):
        raise UserError(
            f"--trace {path}: method {experiment.method.name} has no servers whose events could be "
            "written; give one of HALoS, or leave --trace out"
        )
    specification = experiment.specification
    laboratory = Laboratory.of(specification) if specification is not None else None
    run = ServersRun(World(experiment, laboratory, progress, stop or threading.Event()), settings)
    try:
        with path.open("w", encoding="utf-8") as file:
            run.clock.observers.append(TraceWriter(file))
            return run.run()
    except OSError as error:
        raise UserError(f"--trace {path}: cannot be written: {error.strerror}") from error
