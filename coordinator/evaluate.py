"""``halos eval``: how good a run's newest model is on held-out text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.process import (
    AsJson,
    Attached,
    Certs,
    Data,
    Insecure,
    end_with_standard_input,
    log_to_stderr,
    security_of,
    stopped_by_signals,
)
from coordinator.view import clock

if TYPE_CHECKING:
    from halos.wire.frames import Evaluation


def evaluate(
    directory: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="A run's directory.")
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Evaluate while this coordinator's run trains."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Held-out samples to try; all by default.")
    ] = None,
    data: Data = None,
    certs: Certs = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    attached: Attached = False,
) -> None:
    """Evaluate a run's newest model on the validation set: of a directory, or while it trains.

    Example: halos eval runs/demo, or halos eval --follow coordinator.example:7443
    """
    from halos.errors import UserError

    if (directory is None) == (follow is None):
        raise UserError(
            "halos eval: give a run's directory, or --follow HOST:PORT of its coordinator"
        )
    if directory is not None:
        evaluate_saved(directory, samples, as_json)
        return
    assert follow is not None
    if attached:
        end_with_standard_input()
    watch(follow, data, certs, insecure, as_json)


def watch(
    address: str, data: Path | None, certs: Path | None, insecure: bool, as_json: bool
) -> None:
    """Evaluate each newest model until the run is over, and report to the coordinator."""
    from halos.runtime.observer import Observer
    from halos.wire.security import check_dial

    log_to_stderr()
    security = security_of(certs)
    check_dial(address, security, insecure)

    def tell(found: Evaluation) -> None:
        if as_json:
            print(json.dumps(asdict(found)), flush=True)
        else:
            steps = f"{found.local_steps:,} local steps"
            print(f"{clock(found.elapsed_s)}  {steps}  {found.loss:.3f} nats a token", flush=True)

    observer = Observer.of(address, security, data)
    try:
        with stopped_by_signals(observer.stop):
            observer.follow(tell)
    finally:
        observer.close()


def evaluate_saved(directory: Path, samples: int | None, as_json: bool) -> None:
    """The newest checkpoint of a run's directory."""
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
