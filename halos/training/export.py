"""A trained model as files that other programs read: ``model.safetensors`` and ``config.json``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from halos.core.fragments import Fragments, ModelLayout
from halos.errors import UserError
from halos.training.constants import constants_of
from halos.training.model import ModelSettings, build_model
from halos.training.parameters import layout_of, scatter

MODEL, CONFIG = "model.safetensors", "config.json"
FORMATS = {"gpt": "halos-gpt-1", "factory": "halos-factory-1"}


def export_model(
    path: Path, model: nn.Module | Fragments, layout: ModelLayout, settings: ModelSettings
) -> None:
    """Write ``model`` into folder ``path``, each file whole or not at all, the settings last.

    A tied parameter is stored once, under its first name. One of transformers is written as its
    own ``save_pretrained`` does, for ``from_pretrained`` to read. ``settings`` are those the model
    was built from. Raises ``OSError`` if it cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Fragments):
        model = _holding(model, layout, settings)
    if settings.kind == "transformers":
        _write_pretrained(path, model)
        return
    parameters = dict(model.named_parameters())
    state = {p.names[0]: parameters[p.names[0]] for p in layout.parameters} | constants_of(model)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    _write(path / MODEL, lambda to: save_file(whole, to, metadata={"format": "pt"}))
    config = {"format": FORMATS[settings.kind], "model": settings.model_dump(mode="json")}
    _write(path / CONFIG, lambda to: to.write_text(json.dumps(config, indent=2) + "\n"))


def _holding(fragments: Fragments, layout: ModelLayout, settings: ModelSettings) -> nn.Module:
    if layout.constants:
        raise ValueError("fragments lack the model's constants: give the model")
    model = build_model(settings, seed=0)
    scatter(model, layout, fragments)
    return model


def _write_pretrained(path: Path, model: Any) -> None:
    """The weights first, so that a reader who finds the configuration finds them too."""
    config = model.config
    used = getattr(config, "use_cache", None)
    if used is not None:
        config.use_cache = type(config)().use_cache  # of no use in training, but to others
    try:
        with tempfile.TemporaryDirectory(prefix=".export.", dir=path) as temporary:
            model.save_pretrained(temporary)
            written = sorted(Path(temporary).iterdir(), key=lambda file: file.name == CONFIG)
            for file in written:
                _write(path / file.name, lambda to, file=file: shutil.copyfile(file, to))  # type: ignore[misc]
    finally:
        if used is not None:
            config.use_cache = used


def load_exported(path: Path) -> nn.Module:
    """The model in folder ``path``, on the CPU, tied as it was.

    Raises ``UserError`` if there is none, if its two files do not belong together, or if it is one
    of transformers, which that library loads.
    """
    try:
        config = json.loads((path / CONFIG).read_text())
        state = load_file(path / MODEL)
    except OSError as error:
        raise UserError(f"{path} holds no exported model: {error.strerror or error}") from None
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{path} holds a damaged exported model: {error}") from None
    if isinstance(config, dict) and "model_type" in config:
        raise UserError(
            f"{path} holds a model of transformers; load it by AutoModelForCausalLM.from_pretrained"
        )
    if not isinstance(config, dict) or config.get("format") not in FORMATS.values():
        raise UserError(
            f"{path / CONFIG} does not say format {FORMATS['gpt']}: not exported by halos"
        )
    try:
        model = build_model(ModelSettings.model_validate(config.get("model")), seed=0)
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{path / CONFIG} describes no model: {reason}") from None
    layout = layout_of(model)
    wanted = {p.names[0]: p.shape for p in layout.parameters + layout.constants}
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != wanted:
        raise UserError(f"{path / MODEL} does not hold the parameters that {CONFIG} describes")
    mine = dict(model.named_parameters()) | constants_of(model)
    with torch.no_grad():
        for name, tensor in state.items():
            mine[name].copy_(tensor)
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
