"""``halos status``: where a run stands, asked of its coordinator."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.process import AsJson, Certs, Insecure, security_of

if TYPE_CHECKING:
    from halos.wire.security import Security

LOOK_S = 1.0
DEFAULT = "127.0.0.1:7443"


def status(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[HOST:PORT|RUN.toml|RUN_DIR]",
            help="The coordinator's address, or what a run on this machine was started with.",
        ),
    ] = DEFAULT,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    health: Annotated[
        bool, typer.Option("--health", help="Only whether that server serves; exit code 0 or 1.")
    ] = False,
    certs: Certs = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Show where a run stands: every region, its workers, and what is delivered.

    Example: halos status coordinator.example:7443 --certs certs/operator --watch
    """
    from halos.errors import UserError
    from halos.runtime.control import ask_health
    from halos.wire.security import check_dial

    address, security = address_of(run), security_of(certs)
    check_dial(address, security, insecure)
    if health:
        try:
            serves = asyncio.run(ask_health(address, security))
        except UserError as error:
            print(error, file=sys.stderr)
            serves = False
        print("serving" if serves else "not serving")
        raise typer.Exit(0 if serves else 1)
    show(address, security, watch, as_json)


def show(address: str, security: Security, watch: bool, as_json: bool) -> None:
    """Once, or again and again."""
    from coordinator.view import RunView, overview
    from halos.runtime.control import status_of_server
    from halos.runtime.status import Point, status_told

    console = Console()
    if not watch:
        told = status_of_server(address, security)
        if as_json:
            print(json.dumps(told))
        elif "total" in told:
            console.print(overview(status_told(told), _points(told, Point)))
        else:
            console.print_json(data=told)
        return
    with RunView(console) as view:
        while True:
            told = status_of_server(address, security)
            if as_json:
                print(json.dumps(told), flush=True)
            else:
                view.show(status_told(told), _points(told, Point))
            if told.get("finished"):
                return
            time.sleep(LOOK_S)


def _points(told: dict[str, Any], point: Any) -> list[Any]:
    kept = ("elapsed_s", "local_steps", "tokens", "loss")
    return [point(**{k: entry[k] for k in kept}) for entry in told["evaluations"]]


def address_of(run: str) -> str:
    """An address, or that of the process whose run directory or specification this is.

    Raises ``UserError`` if no process of that run lives here.
    """
    path = Path(run)
    if path.suffix != ".toml" and not path.is_dir():
        return run
    from halos.errors import UserError
    from halos.runtime.control import announced

    folder = path
    if not path.is_dir():
        folder = run_directory(path)
    address = announced(folder)
    if address is None:
        raise UserError(
            f"{folder}: no coordinator of this run is listening; start it, or give HOST:PORT"
        )
    return address


def run_directory(path: Path) -> Path:
    """Where a specification has its run kept, without reading more of it than that."""
    import tomllib

    from halos.errors import UserError

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["run"]
        return Path(path.parent, table.get("directory", Path("runs", table["name"])))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: is no specification of a run that can be read ({error})"
        ) from error
