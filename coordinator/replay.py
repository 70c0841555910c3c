"""``halos replay``: whether a run did what its trace says, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halos.errors import ExitCode


def replay(
    specification: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="What --trace wrote, of all processes.")
    ],
) -> None:
    """Train again in the order of a trace, and compare every line and checksum.

    Example: halos train run.toml --trace run.jsonl && halos replay run.toml run.jsonl
    """
    from halos.runtime.prepare import prepare
    from halos.runtime.recorded import recorded_run
    from halos.runtime.replay import ReplayDiffers
    from halos.runtime.trace import read_trace
    from halos.specification import load_specification

    prepared = prepare(load_specification(specification))
    try:
        replayed = recorded_run(prepared, [read_trace(path) for path in traces]).replay.run()
    except ReplayDiffers as error:
        print(f"The replay differs: {error}")
        raise typer.Exit(ExitCode.BUG) from None
    print(
        f"Replayed {replayed.events:,} events and {replayed.rounds:,} rounds of training: "
        "every line and checksum came out as recorded."
    )
    for name, line in replayed.waiting.items():
        print(f"{line.where}: node {name} goes on, after what a trace that ends earlier lacks.")
    if not replayed.finished:
        print("The end of the run is not among them.")
