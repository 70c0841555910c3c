"""The built-in language model, and models of any kind from their settings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from halos.training.model_settings import PRESETS, ModelSettings

__all__ = [
    "GPT",
    "PRESETS",
    "LanguageModel",
    "ModelSettings",
    "build_gpt",
    "build_model",
    "parameter_count",
]


class LanguageModel(nn.Module):
    """What the inner loop trains: any module from tokens to logits."""

    context: int

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of the token after each of ``tokens`` [B, T]."""
        raise NotImplementedError

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, of ``tokens`` and ``targets`` [B, T]."""
        logits = self(tokens)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


class Linear(nn.Linear):
    """Without a bias, and left uninitialised: the model initialises all of itself at once."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """Left uninitialised, as :class:`Linear` is."""

    def reset_parameters(self) -> None:
        pass


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each on the normalised stream and added to it.

    Queries, keys and values are one product, gate and up projection another: on small models the
    number of operations counts as much as their size.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads, self.kv_heads = settings.heads, settings.kv_heads
        width = settings.width
        self.head_width = width // self.heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = Linear(width, (self.heads + 2 * self.kv_heads) * self.head_width)
        self.attention_out = Linear(width, width)
        self.ffn_norm = nn.RMSNorm(width)
        self.gate_up = Linear(width, 2 * settings.ffn_width)
        self.ffn_out = Linear(settings.ffn_width, width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """From and to [B, T, width]; ``turns`` as :func:`rotate` takes them."""
        x = x + self._attention(self.attention_norm(x), turns)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.ffn_out(F.silu(gate) * up)  # type: ignore[no-any-return]

    def _attention(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_width)
        both, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], dim=2)
        q, k = torch.split(rotate(both, turns).type_as(v), [self.heads, self.kv_heads], dim=2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.attention_out(y.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of features of ``x`` [B, T, heads, head width] by its position's angle.

    ``turns`` [T, 1, head width / 2, 2] holds cosines and sines.
    """
    pairs, turns = x.float().view(*x.shape[:-1], -1, 2), turns.float()
    if torch.compiler.is_compiling():  # it has no code for complex numbers, and fuses these
        (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    # One product of complex numbers takes a fifth of the time of six operations on halves.
    turned = torch.view_as_complex(pairs) * torch.view_as_complex(turns)
    return torch.view_as_real(turned).flatten(-2)


class GPT(LanguageModel):
    """Decoder-only transformer: RMSNorm, rotary positions (Su et al. 2021), SwiGLU, no biases."""

    turns: Tensor

    def __init__(self, settings: ModelSettings) -> None:
        """Parameters are uninitialised until :meth:`reset_parameters`."""
        super().__init__()
        if settings.vocab_size is None or settings.context is None:
            raise ValueError("vocab_size or context is unknown: call ModelSettings.for_data")
        self.settings = settings
        self.context = settings.context
        self.embedding = Embedding(settings.vocab_size, settings.width)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width)
        self.head = Linear(settings.width, settings.vocab_size)
        if settings.tied:
            self.head.weight = self.embedding.weight
        turns = torch.empty(self.context, 1, settings.width // settings.heads // 2, 2)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"sequence of {length} tokens; the model's context is {self.context}")
        turns = self.turns[:length]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Normal weights of deviation 0.02, less where a layer adds to the residual stream.

        Drawn on the CPU from a generator of their own, so that they are the same on every device
        and other threads' random numbers stay as they are.
        """
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * self.settings.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = residual if name.endswith("_out.weight") else 0.02
            parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))
        self.reset_rotary()

    @torch.no_grad()
    def reset_rotary(self) -> None:
        """Fill the table of rotations, which is neither trained nor saved."""
        half = self.turns.shape[2]
        rates = self.settings.rope_base ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(self.context, dtype=torch.float64), rates)[:, None]
        self.turns.copy_(torch.stack((angles.cos(), angles.sin()), dim=-1))


def build_gpt(settings: ModelSettings, seed: int) -> GPT:
    """The built-in model on the CPU, its parameters a function of ``settings`` and ``seed``."""
    model = GPT(settings)
    model.reset_parameters(seed)
    return model


def build_model(settings: ModelSettings, seed: int) -> nn.Module:
    """A model of any kind on the CPU. Raises ``UserError`` if its kind cannot make it.

    One of ``transformers`` or of a factory takes its random numbers from torch, seeded; the
    state of torch's generator is the same afterwards.
    """
    if settings.kind == "gpt":
        return build_gpt(settings, seed)
    from halos.training.foreign import build_foreign

    return build_foreign(settings, seed)


def parameter_count(settings: ModelSettings) -> int:
    """Trainable numbers of a built-in model, tied ones once. Allocates none of them."""
    with torch.device("meta"):
        model = GPT(settings)
    return sum(p.numel() for p in model.parameters())
