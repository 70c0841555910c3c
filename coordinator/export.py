"""``halos export``: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halos.errors import UserError


def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
    to: Annotated[Path, typer.Option(help="Folder to write into.")],
) -> None:
    """Write the newest checkpoint's model as model.safetensors and config.json.

    Example: halos export runs/demo --to exported
    """
    from halos.runtime.saved import load_saved
    from halos.training.export import export_model

    saved = load_saved(directory)
    try:
        export_model(to, saved.model, saved.layout, saved.settings)
    except OSError as error:
        raise UserError(f"{to}: cannot be written: {error.strerror}") from error
    print(f"Wrote {to / 'model.safetensors'} and {to / 'config.json'}.")
