"""How good a model is on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from halos.errors import UserError
from halos.training.data import Dataset
from halos.training.loss import loss_of


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout within; the model's mode is restored afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def validation_loss(
    model: nn.Module, dataset: Dataset, batch_size: int = 32, limit: int | None = None
) -> float:
    """Mean cross-entropy in nats a token over the held-out samples: all, or ``limit`` of them.

    Of a model with a loss of its own, that loss. Raises ``UserError`` if ``limit`` leaves no
    samples, or if the model returns no logits.
    """
    loss_function = loss_of(model)
    device = next(model.parameters()).device
    total, samples = 0.0, 0
    with evaluating(model):
        for tokens, targets in dataset.validation_batches(batch_size, limit):
            loss = loss_function(tokens.to(device), targets.to(device))
            total += float(loss) * len(tokens)
            samples += len(tokens)
    if not samples:
        raise UserError(f"limit is {limit}: a loss needs at least one sample")
    return total / samples
