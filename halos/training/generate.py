"""Text from a model, to see what it has learnt."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from halos.errors import UserError
from halos.training.evaluate import evaluating
from halos.training.loss import context_of, logits_of


def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """``count`` tokens to follow ``prompt``, the same ones for the same ``seed``.

    The model sees the last tokens that its context holds, or all if it has no limit.
    ``temperature`` 0 takes the likeliest token; ``top_k`` draws from that many likeliest only.
    Raises ``UserError`` for an empty prompt or for arguments out of range.
    """
    if not prompt:
        raise UserError("prompt is empty: the model needs at least one token to go on from")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature is {temperature}: it is 0 or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}: it is 1 or more")
    device = next(model.parameters()).device
    seen = context_of(model) or 0  # the last 0 are all
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with evaluating(model):
        for _ in range(count):
            window = torch.tensor([tokens[-seen:]], device=device)
            logits = logits_of(model(window))[0, -1].float().cpu()
            tokens.append(_draw(logits, temperature, top_k, generator))
    return tokens[len(prompt) :]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    # The largest logit goes to 0 first, or a tiny temperature would make it infinite.
    probabilities = ((logits - logits.max()) / temperature).softmax(dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def encode_bytes(text: str) -> list[int]:
    """Tokens of a byte-level model."""
    return list(text.encode())


def decode_bytes(tokens: list[int]) -> str:
    """Text of a byte-level model's tokens; what is no UTF-8 becomes a replacement character."""
    return bytes(tokens).decode(errors="replace")
