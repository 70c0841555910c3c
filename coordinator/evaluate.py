"""``halos eval``: how good a run's newest model is on held-out text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Held-out samples to try; all by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Evaluate the newest checkpoint's model on the validation set.

    Example: halos eval runs/demo
    """
    from halos.runtime.saved import load_saved
    from halos.training.bigram import bigram_loss
    from halos.training.data import open_dataset
    from halos.training.evaluate import validation_loss

    saved = load_saved(directory)
    dataset = open_dataset(saved.specification.data)
    loss = validation_loss(saved.model, dataset, limit=samples)
    bigram = bigram_loss(dataset)
    if as_json:
        result = {
            "checkpoint": str(saved.path),
            "local_steps": saved.local_steps,
            "validation_loss": loss,
            "bigram_loss": bigram,
        }
        print(json.dumps(result))
        return
    print(f"{saved.path}, after {saved.local_steps:,} local steps")
    print(f"validation loss    {loss:.3f} nats a token")
    if bigram is not None:
        print(f"bigram model       {bigram:.3f}")
