"""``halos status``: where a run stands, asked of its coordinator."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.process import AsJson, Certs, Insecure, security_of, stopped_by_signals

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.view import RunView
    from halos.runtime.status import Point
    from halos.wire.security import Security

LOOK_S = 1.0
PATIENCE_S = 60.0  # for a server that was there and is not
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

    security = security_of(certs)
    check_dial(address_of(run), security, insecure)
    if health:
        try:
            serves = asyncio.run(ask_health(address_of(run), security))
        except UserError as error:
            print(error, file=sys.stderr)
            serves = False
        print("serving" if serves else "not serving")
        raise typer.Exit(0 if serves else 1)
    show(run, security, watch, as_json)


def show(run: str, security: Security, watch: bool, as_json: bool) -> None:
    """Once, or again and again until the run is over."""
    from halos.runtime.control import status_of_server

    console = Console()
    if not watch:
        told = status_of_server(address_of(run), security)
        if as_json:
            print(json.dumps(told))
        else:
            console.print(picture(console, told), highlight=False)
        return
    from coordinator.view import RunView

    stopping = threading.Event()
    with stopped_by_signals(stopping.set), RunView(console) as view:
        for told in looks(run, security, stopping):
            if as_json:
                print(json.dumps(told), flush=True)
            else:
                put(view, console, told)


def looks(run: str, security: Security, stopping: threading.Event) -> Iterator[dict[str, Any]]:
    """What a server says, every second. One that is started again is waited for.

    Raises ``UserError`` if it does not answer at first, or not again for a minute.
    """
    from halos.errors import UserError
    from halos.runtime.control import status_of_server

    lost: float | None = float("-inf")
    while not stopping.is_set():
        try:
            told = status_of_server(address_of(run), security)
        except UserError as error:
            if lost is None:
                lost = time.monotonic()
                print(f"{error}; asking again", file=sys.stderr)
            elif time.monotonic() > lost + PATIENCE_S:
                raise
        else:
            lost = None
            yield told
            if told.get("finished"):
                return
        stopping.wait(LOOK_S)


def picture(console: Console, told: dict[str, Any]) -> RenderableType:
    """Of a whole run, or of one region where its server was asked."""
    from coordinator.view import overview, server_overview
    from halos.runtime.status import status_told

    if is_region(told):
        return server_overview(console, told)
    return overview(console, status_told(told), points_of(told))


def put(view: RunView, console: Console, told: dict[str, Any]) -> None:
    """The newest picture into ``view``."""
    from coordinator.view import server_line, server_overview
    from halos.runtime.status import status_told

    if is_region(told):
        view.put(lambda: server_overview(console, told), lambda: server_line(told))
    else:
        view.show(status_told(told), points_of(told))


def is_region(told: dict[str, Any]) -> bool:
    """Only the coordinator knows of the whole run."""
    return "link" in told


def points_of(told: dict[str, Any]) -> list[Point]:
    from halos.runtime.status import Point

    kept = ("elapsed_s", "local_steps", "tokens", "loss")
    return [Point(**{k: entry[k] for k in kept}) for entry in told["evaluations"]]


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
