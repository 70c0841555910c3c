"""The command line ``halos``. Each command is a function in a module of its own.

Nothing here, and nothing at the top of a command's module, may import torch: ``halos --help``
answers at once, and only a command that computes pays for what it computes with.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from coordinator import bench, certs
from coordinator.compare import compare
from coordinator.demo import demo
from coordinator.evaluate import evaluate
from coordinator.export import export
from coordinator.generate import generate
from coordinator.init import init
from coordinator.netem import netem
from coordinator.replay import replay
from coordinator.serve import coordinator, server
from coordinator.simulate import simulate
from coordinator.status import status
from coordinator.train import train
from coordinator.up import up
from coordinator.work import worker
from halos.errors import ExitCode, UserError

EXIT_CODES = "Exit codes:\n\n" + "\n\n".join(f"{code.value}  {code.help}" for code in ExitCode)

app = typer.Typer(
    name="halos",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES,
)


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"halos {version('halos')}")
        raise typer.Exit


@app.callback()
def halos(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Train one language model on accelerators in several places, over slow networks."""


for command in (init, up, train, demo, coordinator, server, worker, status):
    app.command()(command)
app.command("eval")(evaluate)
for tool in (generate, export, simulate, compare, replay, netem):
    app.command()(tool)
app.add_typer(certs.app)
app.add_typer(bench.app)


def run() -> None:
    """Run a command; a user's mistake is one line on standard error, never a traceback."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.USER)
