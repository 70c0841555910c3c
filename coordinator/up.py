"""``halos up``: a whole run as processes on this machine, over emulated links if so specified."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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

    With a link table, regions reach the coordinator over links of that rate and delay. What dies
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
    stopping: list[bool] = []
    with ExitStack() as stack:
        local = stack.enter_context(LocalProcesses.of(settings, path, tls, trace))
        stack.enter_context(stopped_by_signals(lambda: stopping.append(True)))
        servers, workers = len(settings.regions), len(settings.workers)
        console.print(
            f"Starting the coordinator, {servers} servers and {workers} workers; what each says "
            f"is in {local.fleet.logs}.",
            highlight=False,
            soft_wrap=True,
        )
        with console.status("Starting"):
            local.start(lambda: bool(stopping))
        speed = _Speed()
        with RunView(console) as view:
            while not local.coordinator.done and not stopping:
                local.fleet.look()
                if (seen := local.status()) is not None:
                    view.show(seen, Losses(folder).points)
                    speed.note(seen)
                time.sleep(LOOK_S)
        local.end(finished=not stopping)
        traffic = local.traffic()
    about = {"wall_s": time.monotonic() - began, "wide_area_bytes": traffic}
    if stopping:
        return {"finished": False, **about}
    return about | speed.result() | _final(folder)


@dataclass
class _Speed:
    """How fast the run was, as seen from outside while all its workers were there."""

    first: RunStatus | None = None
    last: RunStatus | None = None

    def note(self, status: RunStatus) -> None:
        if all(region.workers == region.expected for region in status.regions):
            self.first = self.first or status
            self.last = status

    def result(self) -> dict[str, Any]:
        if self.first is None or self.last is None:
            return {"tokens_per_s": None, "computing_share": None}
        elapsed = self.last.elapsed_s - self.first.elapsed_s
        tokens = self.last.tokens - self.first.tokens
        return asdict(self.last) | {"tokens_per_s": tokens / elapsed if elapsed > 0 else None}


def _final(folder: Path) -> dict[str, Any]:
    """What the run came to, from its last checkpoint."""
    from halos.runtime.saved import load_saved
    from halos.training.data import open_dataset
    from halos.training.evaluate import validation_loss

    saved = load_saved(folder)
    told = {"finished": saved.finished, "checkpoint": str(saved.path), **saved.counts}
    if saved.finished:
        dataset = open_dataset(saved.specification.data)
        told["validation_loss"] = validation_loss(saved.model, dataset)
    return told
