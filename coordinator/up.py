"""``halos up``: a whole run as processes on this machine, over emulated links if so specified."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.process import AsJson, stopped_by_signals

if TYPE_CHECKING:
    from halos.runtime.status import RunStatus
    from halos.specification import RunSpecification

LOOK_S = 0.5


def up(
    specification: Annotated[Path, typer.Argument(help="The run's TOML file; see `halos init`.")],
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt all connections, as between machines.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write each process's events to a file in this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run coordinator, servers and workers as processes here, connected over gRPC.

    With a [link] table, regions reach the coordinator over links of that rate and delay. What dies
    is started again. Ctrl-C saves and leaves; the same command goes on.

    Example: halos init run.toml && halos up run.toml
    """
    from halos.specification import load_specification

    console = Console(stderr=as_json)
    settings = load_specification(specification)
    result = run_up(settings, specification, console, tls=tls, trace=trace)
    if as_json:
        print(json.dumps(result))
    elif result["finished"]:
        from coordinator.train import told

        console.print(told(result), highlight=False)
    else:
        console.print(
            f"Stopped and saved. Go on with: halos up {specification}{' --tls' * tls}",
            highlight=False,
            soft_wrap=True,
        )


def run_up(
    settings: RunSpecification,
    path: Path,
    console: Console,
    *,
    tls: bool = False,
    trace: Path | None = None,
) -> dict[str, Any]:
    """All of a run to its end or to a signal. ``path`` is where ``settings`` are read from."""
    from coordinator.local import LocalProcesses
    from coordinator.view import RunView
    from halos.runtime.losses import Losses

    folder = settings.run.directory
    began = time.monotonic()
    with ExitStack() as stack:
        local = stack.enter_context(LocalProcesses.of(settings, path, tls, trace))
        stopping: list[bool] = []
        stack.enter_context(stopped_by_signals(lambda: stopping.append(True)))
        view = stack.enter_context(RunView(console))
        local.start(lambda: bool(stopping))
        status = None
        while local.coordinator.lives and not stopping:
            local.fleet.look()
            if (seen := local.status()) is not None:
                view.show(seen, Losses(folder).points)
                if seen.computing_share is not None:  # workers are here
                    status = seen
            time.sleep(LOOK_S)
        finished = local.coordinator.popen.poll() == 0 and not stopping
        local.end(finished=finished)
        traffic = local.traffic()
    result: dict[str, Any] = {
        "finished": finished,
        "wall_s": time.monotonic() - began,
        "wide_area_bytes": traffic,
        **(_final(folder, status) if finished else {}),
    }
    return result


def _final(folder: Path, status: RunStatus | None) -> dict[str, Any]:
    """What a finished run came to, from its last checkpoint; its speed as of when it was seen."""
    from halos.runtime.saved import load_saved
    from halos.training.data import open_dataset
    from halos.training.evaluate import validation_loss

    saved = load_saved(folder)
    loss = validation_loss(saved.model, open_dataset(saved.specification.data))
    seen = asdict(status) if status is not None else {"computing_share": None, "tokens_per_s": None}
    return {**seen, **saved.counts, "checkpoint": str(saved.path), "validation_loss": loss}
