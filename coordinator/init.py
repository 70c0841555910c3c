"""``halos init``: write a specification to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from halos.errors import UserError

TEMPLATE = Path(__file__).with_name("template.toml")


def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a run's specification, complete and with every field explained."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(named(TEMPLATE.read_text(encoding="utf-8"), path))
    except FileExistsError:
        raise UserError(f"{path}: exists already; give another name, or --force") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"Wrote {path}. Read it, change what you like, then: halos train {path}")


def named(template: str, path: Path) -> str:
    """The template with the run called after its file, for runs may not share a directory."""
    name = path.stem.replace(".", "-")
    return template.replace('"first"', json.dumps(name)).replace(
        '"runs/first"', json.dumps(f"runs/{name}")
    )
