"""``halos generate``: text from a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from halos.errors import UserError


def generate(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    count: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many only.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds write equal text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let the newest checkpoint's model go on from a prompt.

    Example: halos generate runs/demo --prompt "class Server:"
    """
    from halos.runtime.saved import load_saved
    from halos.training.generate import decode_bytes, encode_bytes
    from halos.training.generate import generate as run_on

    saved = load_saved(directory)
    if saved.settings.vocab_size != 256:
        raise UserError(
            f"{directory}: this model reads tokens of a vocabulary of "
            f"{saved.settings.vocab_size}, not text; export it, and use its own tokenizer"
        )
    tokens = run_on(
        saved.model,
        encode_bytes(prompt),
        count,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    text = decode_bytes(tokens)
    print(json.dumps({"prompt": prompt, "text": text}) if as_json else prompt + text)
