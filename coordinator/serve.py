"""``halos coordinator`` and ``halos server``: parameter servers as processes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.process import (
    AsJson,
    Attached,
    Certs,
    Insecure,
    Join,
    Listen,
    Trace,
    end_with_standard_input,
    log_to_stderr,
    security_of,
    stopped_by_signals,
)

if TYPE_CHECKING:
    from halos.runtime.server_process import ServerProcess
    from halos.wire.frames import Evaluation

log = logging.getLogger("halos")


def coordinator(
    specification: Annotated[Path, typer.Argument(help="The run's TOML file; see `halos init`.")],
    listen: Listen = "127.0.0.1:7443",
    certs: Certs = None,
    insecure: Insecure = False,
    trace: Trace = None,
    as_json: AsJson = False,
    attached: Attached = False,
) -> None:
    """Run the coordinator: the root's parameter server, which owns the run and its settings.

    Goes on by itself with the run that its directory holds. Ctrl-C saves and leaves.

    Example: halos coordinator run.toml --listen 0.0.0.0:7443 --certs certs/coordinator
    """
    from halos.runtime import server_process
    from halos.specification import load_specification
    from halos.wire.security import check_listen

    log_to_stderr()
    security = security_of(certs)
    check_listen(listen, security, insecure)
    settings = load_specification(specification)
    if attached:
        end_with_standard_input()
    told, about = server_process.told_by(settings, _say)
    with server_process.coordinator(told, about, listen, security, trace=trace) as process:
        keep_losses(process)
        serve(process, f"run {settings.run.name}", as_json)


def server(
    region: Annotated[str, typer.Option(help="The region's name in the run's specification.")],
    join: Join,
    listen: Listen = "127.0.0.1:0",
    directory: Annotated[
        Path | None, typer.Option(help="Its state goes here; by default runs/RUN/servers/REGION.")
    ] = None,
    certs: Certs = None,
    insecure: Insecure = False,
    trace: Trace = None,
    as_json: AsJson = False,
    attached: Attached = False,
) -> None:
    """Run one region's parameter server. Its settings come from the coordinator.

    Goes on by itself from what its directory holds. Ctrl-C saves and leaves.

    Example: halos server --region eu --join coordinator.example:7443 --certs certs/eu
    """
    from halos.runtime import server_process
    from halos.wire.security import check_dial, check_listen

    log_to_stderr()
    security = security_of(certs)
    check_listen(listen, security, insecure)
    check_dial(join, security, insecure)
    if attached:
        end_with_standard_input()
    with server_process.region(
        region, join, listen, security, directory=directory, trace=trace
    ) as process:
        serve(process, f"region {region} of run {process.specification.run.name}", as_json)


def serve(process: ServerProcess, what: str, as_json: bool) -> None:
    """Until the run is over, or a signal; then save and say so."""
    with stopped_by_signals(process.driver.stop):  # before anybody hears that we are here
        process.keeping.announce(process.address)
        log.info("%s: listening on %s", what, process.address)
        finished = process.run()
        path = process.save()
    state = "the run is over" if finished else "stopped; the same command goes on from here"
    log.info("%s: %s; saved in %s", what, state, path)
    if as_json:
        print(json.dumps({"finished": finished, "checkpoint": str(path), **process.status()}))


def keep_losses(process: ServerProcess) -> None:
    """Evaluations go where those of ``halos train`` go, and survive a restart."""
    from halos.runtime.losses import Losses
    from halos.runtime.status import Point

    losses = Losses(process.keeping.folder)
    losses.forget_after(process.server.state.reported.local_steps)

    def keep(found: Evaluation) -> None:
        losses.keep(Point(found.elapsed_s, found.local_steps, found.tokens, found.loss))

    process.on_evaluation = keep


def _say(done: int, total: int) -> None:
    if done == 0:
        log.info("building the data set, once: %d files", total)
