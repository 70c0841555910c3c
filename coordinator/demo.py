"""``halos demo``: a small run over three regions, from nothing to a model that writes Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from halos.runtime.local import LocalRun

SPECIFICATION = Path(__file__).with_name("demo.toml")
PROMPT = "def "
CHARACTERS = 320


def demo(
    directory: Annotated[
        Path, typer.Option(help="Where the run is kept; what an earlier demo left is replaced.")
    ] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Local steps of all workers; 6144 by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a small model on real text over three regions, in under four minutes on two cores.

    Example: halos demo --directory /tmp/demo
    """
    from coordinator.train import follow, progress_line, told
    from halos.reading import read_settings
    from halos.runtime.local import open_run
    from halos.runtime.prepare import prepare
    from halos.specification import RunSpecification
    from halos.training.bigram import bigram_loss

    console = Console(stderr=as_json)
    specification = read_settings(SPECIFICATION, RunSpecification)
    run_table = specification.run.model_copy(update={"directory": directory})
    training = specification.training
    if steps is not None:
        training = training.model_copy(update={"local_steps_total": steps})
    specification = specification.model_copy(update={"run": run_table, "training": training})
    prepared = prepare(specification, progress_line(console))
    console.print(
        f"Three regions of two workers train {prepared.layout.numel:,} parameters on the text of "
        "Python's standard library.\nCtrl-C stops and saves.\n",
        highlight=False,
    )
    with open_run(prepared, beginning="replace") as run:
        result = follow(run, console)
        result["bigram_loss"] = bigram_loss(prepared.dataset)
        result["text"] = run_on(run) if result["finished"] else None
    if as_json:
        print(json.dumps(result))
        return
    if not result["finished"]:
        console.print(f"Stopped and saved in {result['checkpoint']}.", highlight=False)
        return
    console.print(told(result), highlight=False)
    console.print(
        f"{'bigram model':<18} {result['bigram_loss']:.3f} nats a token, to compare with\n\n"
        f"What it writes after {PROMPT!r}:",
        highlight=False,
    )
    console.print(Text(PROMPT + result["text"], style="cyan"))


def run_on(run: LocalRun) -> str:
    """What the trained model makes of the prompt."""
    from halos.training.generate import decode_bytes, encode_bytes, generate
    from halos.training.model import build_model
    from halos.training.parameters import scatter

    model = build_model(run.prepared.model, seed=0)
    scatter(model, run.prepared.layout, run.model)
    return decode_bytes(generate(model, encode_bytes(PROMPT), CHARACTERS, temperature=0.7))
