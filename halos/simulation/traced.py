"""A simulated run that writes down all that happens, in the form of every other driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from halos.errors import UserError
from halos.runtime.trace import TraceWriter
from halos.simulation.experiment import Experiment, run_experiment
from halos.simulation.methods import Servers
from halos.simulation.outcome import Outcome


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
    if not isinstance(experiment.method.settings, Servers):
        raise UserError(
            f"--trace {path}: method {experiment.method.name} has no servers whose events could be "
            "written; give one of HALoS, or leave --trace out"
        )
    try:
        with path.open("w", encoding="utf-8") as file:
            writer = TraceWriter(file)
            return run_experiment(experiment, progress=progress, stop=stop, observers=[writer])
    except OSError as error:
        raise UserError(f"--trace {path}: cannot be written: {error.strerror}") from error
