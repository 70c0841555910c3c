"""What a run directory holds: its newest model and the specification that it was made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from halos.core.fragments import Fragments, ModelLayout
from halos.core.topology import ROOT
from halos.errors import UserError
from halos.runtime.local import checkpoints
from halos.specification import RunSpecification
from halos.store import snapshots
from halos.training.model import ModelSettings, build_model
from halos.training.parameters import layout_of, scatter


@dataclass(frozen=True)
class SavedModel:
    """The root's model as of the newest checkpoint."""

    path: Path
    model: nn.Module
    layout: ModelLayout
    settings: ModelSettings
    specification: RunSpecification
    local_steps: int
    finished: bool
    counts: dict[str, int]
    """What the root's books say: tokens, local steps; samples in all, credited, delivered."""


def load_saved(folder: Path) -> SavedModel:
    """From a run directory. Raises ``UserError`` when there is no run in it."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such run directory")
    snapshot = snapshots.newest(checkpoints(folder))
    manifest = snapshot.manifest
    settings = ModelSettings.model_validate(manifest["model"])
    specification = RunSpecification.model_validate(manifest["specification"])
    # What is not trained follows from the seed, as at the run's start.
    model = build_model(settings, specification.run.seed)
    layout = layout_of(model)
    theta = manifest["servers"][ROOT]["parts"]["theta"]
    scatter(model, layout, Fragments([snapshot.tensors[key] for key in theta]))
    return SavedModel(
        path=snapshot.path,
        model=model.eval(),
        layout=layout,
        settings=settings,
        specification=specification,
        local_steps=manifest["nodes"][ROOT]["reported"]["local_steps"],
        finished=manifest["finished"],
        counts=_counts(manifest),
    )


def _counts(manifest: dict[str, Any]) -> dict[str, int]:
    root = manifest["nodes"][ROOT]
    ledger, reported = root["leasing"]["ledger"], root["reported"]
    return {
        "local_steps": reported["local_steps"],
        "tokens": reported["tokens"],
        "credited": ledger["credited"]["total"],
        "delivered": ledger["delivered"]["total"],
        "total": manifest["facts"]["[training] length"],
    }
