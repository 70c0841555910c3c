"""A trained model as files that other programs read: ``model.safetensors`` and ``config.json``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from halos.core.fragments import Fragments, ModelLayout
from halos.errors import UserError
from halos.training.model import GPT, ModelSettings
from halos.training.parameters import gather, layout_of, to_state_dict

MODEL, CONFIG, FORMAT = "model.safetensors", "config.json", "halos-gpt-1"


def export_model(
    path: Path, model: GPT | Fragments, layout: ModelLayout, settings: ModelSettings
) -> None:
    """Write ``model`` into folder ``path``, each file whole or not at all, the settings last.

    A tied parameter is stored once, under its first name. ``settings`` are those the model was
    built from. Raises ``OSError`` if it cannot be written.
    """
    fragments = model if isinstance(model, Fragments) else gather(model, layout)
    state = to_state_dict(layout, fragments)
    path.mkdir(parents=True, exist_ok=True)
    _write(path / MODEL, lambda to: save_file(state, to, metadata={"format": "pt"}))
    config = {"format": FORMAT, "model": settings.model_dump()}
    _write(path / CONFIG, lambda to: to.write_text(json.dumps(config, indent=2) + "\n"))


def load_exported(path: Path) -> GPT:
    """The model in folder ``path``, on the CPU, tied as it was.

    Raises ``UserError`` if there is none, or if its two files do not belong together.
    """
    try:
        config = json.loads((path / CONFIG).read_text())
        state = load_file(path / MODEL)
    except OSError as error:
        raise UserError(f"{path} holds no exported model: {error.strerror or error}") from None
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{path} holds a damaged exported model: {error}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UserError(f"{path / CONFIG} does not say format {FORMAT}: not exported by halos")
    try:
        model = GPT(ModelSettings.model_validate(config.get("model")))
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{path / CONFIG} describes no model: {reason}") from None
    wanted = {p.names[0]: p.shape for p in layout_of(model).parameters}
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != wanted:
        raise UserError(f"{path / MODEL} does not hold the parameters that {CONFIG} describes")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)
    model.reset_rotary()
    return model


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Under another name first, so that nobody ever reads half a file."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes files that only their owner reads
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
