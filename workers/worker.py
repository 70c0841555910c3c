"""The worker process: somebody's training loop, with the run's own model and data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from halos import Run


def train(run: Run) -> bool:
    """Train what this worker is leased, until the run is over or left. Whether it is over."""
    for tokens, targets in run.batches():
        loss = run.loss(tokens, targets) / run.accumulation
        torch.autograd.backward(loss)
        run.step(loss)
    return run.finished
