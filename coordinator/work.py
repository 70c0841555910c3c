"""``halos worker``: a worker as a process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from coordinator.process import (
    Attached,
    Certs,
    Data,
    Insecure,
    Join,
    Trace,
    end_with_standard_input,
    log_to_stderr,
    stopped_by_signals,
)

log = logging.getLogger("halos")


def worker(
    join: Join,
    name: Annotated[
        str | None, typer.Option(help="Its name in its region; by default one that is free.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Keeps its optimizer's state between two starts.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda; by default what the run says.")
    ] = None,
    data: Data = None,
    certs: Certs = None,
    insecure: Insecure = False,
    trace: Trace = None,
    attached: Attached = False,
) -> None:
    """Run one worker: train on what its region's server, or the coordinator, leases it.

    Settings, model and data come with the run. Ctrl-C finishes what is under way, and leaves.

    Example: halos worker --join 10.0.0.7:7443 --certs certs/worker
    """
    import halos
    from workers.worker import train

    log_to_stderr()
    if attached:
        end_with_standard_input()
    with halos.join(
        join,
        name=name,
        certs=certs,
        insecure=insecure,
        directory=directory,
        data=data,
        device=device,
        trace=trace,
        progress=_say,
    ) as run:
        log.info("%s: training on %s", run.name, run.device)
        with stopped_by_signals(run.stop):
            finished = train(run)
    state = "the run is over" if finished else "stopped"
    log.info("%s: %s after %d rounds", run.name, state, run.rounds)


def _say(done: int, total: int) -> None:
    if done == 0:
        log.info("building the data set, once: %d files", total)
