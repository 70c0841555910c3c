"""What a language model's training minimises, whatever form the model's answer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from halos.errors import UserError
from halos.training.model_settings import POSITIONS
from halos.training.optimizer import InnerSettings

LossFunction = Callable[[Tensor, Tensor], Tensor]


def logits_of(answer: Any) -> Tensor:
    """The logits [B, T, V] in what a model returns: a tensor, or ``.logits``, or ``["logits"]``.

    Raises ``UserError`` if there are none.
    """
    if isinstance(answer, Tensor):
        return answer
    found = answer.get("logits") if isinstance(answer, Mapping) else None
    found = getattr(answer, "logits", None) if found is None else found
    if not isinstance(found, Tensor):
        raise UserError(
            f"model: its forward returns {type(answer).__name__} without logits; return logits "
            "[batch, length, vocabulary], or give the model a method loss(tokens, targets)"
        )
    return found


def context_of(model: nn.Module) -> int | None:
    """The longest sequence that the model takes, in tokens; ``None`` if it does not say so."""
    own = getattr(model, "context", None)
    found = own or getattr(getattr(model, "config", None), POSITIONS, None)
    return found if isinstance(found, int) else None


def loss_of(model: nn.Module) -> LossFunction:
    """Mean loss in nats a token, of tokens and targets [B, T]: targets are one token further.

    The model's own method ``loss(tokens, targets)``, or the cross-entropy of its logits.
    """
    own = getattr(model, "loss", None)
    if callable(own) and not isinstance(own, nn.Module):  # a criterion takes logits, not tokens
        found: LossFunction = own
        return found

    def cross_entropy(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = logits_of(model(tokens))
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))

    return cross_entropy


class TrainingLoss:
    """:func:`loss_of`, in the precision of the settings, and compiled if they say so."""

    def __init__(self, model: nn.Module, settings: InnerSettings) -> None:
        self._loss = loss_of(model)
        if settings.compile:
            self._loss = torch.compile(self._loss)
        self._settings = settings

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._precision(tokens.device):
            return self._loss(tokens, targets)

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self._settings.precision == "bf16":
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()
