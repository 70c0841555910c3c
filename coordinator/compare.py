"""``halos compare``: methods beside each other, on the same data, seeds and environment."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.process import AsJson, stopped_by_signals
from coordinator.simulate import Run, loaded
from halos.errors import ExitCode, UserError

if TYPE_CHECKING:
    from halos.simulation.campaign import Job
    from halos.simulation.comparison import Comparison
    from halos.simulation.methods import Method
    from halos.simulation.outcome import Outcome

WIDE = 200  # characters, for a table that goes into a file
NO_PICTURES = 'No pictures: matplotlib is not installed; pip install "halos[report]"'


def compare(
    environment: Annotated[
        str, typer.Argument(metavar="ENV", help="A TOML file, or a name: halos simulate --list.")
    ],
    methods: Annotated[
        str, typer.Option(metavar="A,B,C", help="The others are set beside the first.")
    ] = "fast,paper",
    target_loss: Annotated[
        float | None,
        typer.Option(help="By default where the method paper ends, else the worst method."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="How often each is run, on seeds 0, 1, ...")
    ] = 3,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Local steps of all workers; 6144 by default.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes side by side; as many as cores.")
    ] = None,
    run: Run = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="By default runs/compare-ENV.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate several methods with several seeds; a table, and files with all of it and pictures.

    What DIR holds already is not computed again. Ctrl-C keeps what is finished.

    Example: halos compare paper-4x4 --methods fast,paper,diloco-dynamic --seeds 3
    """
    if target_loss is not None and not 0 < target_loss < math.inf:
        raise UserError(
            f"--target-loss {target_loss:g}: is not allowed; give a number greater than 0"
        )
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = WIDE
    names, work = planned(console, environment, methods, seeds, steps, run, to)
    outcomes = followed(work, jobs or os.cpu_count() or 1, console)
    done = [outcome for outcome in outcomes if outcome is not None]
    folder = work[0].folder.parent
    if not done:
        console.print("Stopped before anything was finished.")
        raise typer.Exit(ExitCode.INTERRUPTED)
    report(names, done, len(work), target_loss, folder, console, as_json)


def planned(
    console: Console,
    environment: str,
    methods: str,
    seeds: int,
    steps: int | None,
    run: Path | None,
    to: Path | None,
) -> tuple[list[str], list[Job]]:
    """The methods, and one job each with every seed. Raises ``UserError``."""
    from coordinator.train import progress_line
    from halos.simulation.campaign import Job
    from halos.simulation.environment import Environment
    from halos.simulation.planning import Training

    where, chosen = Environment.load(environment), parsed(methods)
    training = Training(where, loaded(run), local_steps=steps, progress=progress_line(console))
    folder = writable((to or Path("runs", f"compare-{where.name}")) / "outcomes")
    experiments = training.experiments(chosen, range(seeds))
    work = [Job(experiment, folder, training.data.name) for experiment in experiments]
    return [method.name for method in chosen], work


def parsed(methods: str) -> list[Method]:
    """Raises ``UserError``."""
    from halos.simulation.methods import method_of

    chosen: dict[str, Method] = {}
    for text in methods.split(","):
        method = method_of(text)
        if method.name in chosen:
            raise UserError(f"--methods: {method.name} is there twice; name each once")
        chosen[method.name] = method
    return list(chosen.values())


def writable(folder: Path) -> Path:
    """Made if need be. Raises ``UserError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--to {folder.parent}: cannot be written: {error.strerror}") from error
    return folder


def followed(work: Sequence[Job], at_once: int, console: Console) -> list[Outcome | None]:
    """Run what is not there yet to its end, or to a signal, showing progress."""
    from coordinator.progress import ShareBar
    from halos.simulation.campaign import run_campaign

    stop = threading.Event()
    what = f"{len(work)} runs on {work[0].experiment.environment.name}"
    with ShareBar(console, what) as bar, stopped_by_signals(stop.set):
        return run_campaign(
            work,
            at_once=at_once,
            stop=stop,
            told=lambda share, finished: bar.show(share, f"{finished} finished"),
        )


def report(
    names: Sequence[str],
    done: Sequence[Outcome],
    wanted: int,
    target_loss: float | None,
    folder: Path,
    console: Console,
    as_json: bool,
) -> None:
    """Write all files, and print the table and where they are."""
    from halos.simulation import comparison
    from halos.simulation.report import draw, write_tables

    compared = comparison.compare(done, target_loss, first=names[0])
    facts: dict[str, Any] = {
        "partial": len(done) < wanted,
        "runs_finished": len(done),
        "runs_wanted": wanted,
        "first": names[0],
    }
    try:
        write_tables(compared, folder, facts)
        draw(compared, done, folder)
    except ImportError:
        console.print(NO_PICTURES, markup=False, highlight=False, soft_wrap=True)
    except OSError as error:
        raise UserError(f"--to {folder}: cannot be written: {error.strerror}") from error
    if as_json:
        print(json.dumps({**facts, **asdict(compared)}))
        return
    print_comparison(compared, names[0], console)
    if facts["partial"]:
        console.print(
            f"A partial report: {len(done)} of {wanted} runs were finished. The same command goes "
            "on with the others.",
            soft_wrap=True,
            highlight=False,
        )
    where = f"Report and outcomes: {folder}"
    console.print(where, markup=False, highlight=False, soft_wrap=True)


def print_comparison(compared: Comparison, first: str, console: Console) -> None:
    from coordinator.tables import comparison_tables

    console.print(*comparison_tables(compared, first, console), sep="\n\n", highlight=False)
    console.print()
