"""``halos demo``: a small run over three regions, from nothing to a model that writes Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from coordinator.process import AsJson

SPECIFICATION = Path(__file__).with_name("demo.toml")
NAME, STEPS = "demo", "local_steps_total = 6144"
PROMPT = "def "
CHARACTERS = 320


def demo(
    directory: Annotated[
        Path, typer.Option(help="Where the run is kept; what an earlier demo left is replaced.")
    ] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Local steps of all workers; 6144 by default.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt all connections.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a small model on real text over three regions, in under four minutes on two cores.

    A coordinator, three servers and six workers, each a process of its own; the regions reach the
    coordinator over emulated links of 100 Mbit/s and 80 ms.

    Example: halos demo --directory /tmp/demo
    """
    from coordinator.train import progress_line, told
    from coordinator.up import run_up
    from halos.runtime.local import clear
    from halos.runtime.prepare import prepare
    from halos.specification import load_specification

    console = Console(stderr=as_json)
    path = written(directory, steps)
    clear(directory, NAME)
    settings = load_specification(path)
    prepared = prepare(settings, progress_line(console))
    console.print(
        f"Three regions of two workers train {prepared.layout.numel:,} parameters on the text of "
        "Python's standard library.\nTen processes start first; Ctrl-C stops and saves.\n",
        highlight=False,
    )
    result = run_up(settings, path, console, tls=tls)
    if result["finished"]:
        result |= compared(directory)
    if as_json:
        print(json.dumps(result))
        return
    if not result["finished"]:
        console.print(f"Stopped and saved in {directory}.", highlight=False)
        return
    console.print(told(result), highlight=False)
    console.print(
        f"{'bigram model':<18} {result['bigram_loss']:.3f} nats a token, to compare with\n\n"
        f"What it writes after {PROMPT!r}:",
        highlight=False,
    )
    console.print(Text(PROMPT + result["text"], style="cyan"))


def written(directory: Path, steps: int | None) -> Path:
    """The demo's specification, as a file in the directory of its run."""
    from halos.errors import UserError

    text = SPECIFICATION.read_text(encoding="utf-8")
    if steps is not None:
        text = text.replace(STEPS, f"local_steps_total = {steps}")
    path = directory / "demo.toml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--directory {directory}: cannot be written to: {error.strerror}"
        ) from error
    return path


def compared(directory: Path) -> dict[str, object]:
    """What a model must beat, and what the trained one makes of the prompt."""
    from halos.runtime.saved import load_saved
    from halos.training.bigram import bigram_loss
    from halos.training.data import open_dataset
    from halos.training.generate import decode_bytes, encode_bytes, generate

    saved = load_saved(directory)
    text = generate(saved.model, encode_bytes(PROMPT), CHARACTERS, temperature=0.7)
    return {
        "bigram_loss": bigram_loss(open_dataset(saved.specification.data)),
        "text": decode_bytes(text),
    }
