"""The equations of the algorithm, each one function of tensors or numbers.

Sources: HALoS (Kim et al. 2025, arXiv 2506.04531); delayed Nesterov (Liu et al. 2024,
arXiv 2401.09135, algorithm 3). Every function of tensors writes into ``out`` tensors, which may
be the inputs themselves, and makes no temporary of their size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from halos.core.settings import Settings


class OuterSettings(Settings):
    """Outer optimizer of one tier: delayed Nesterov.

    ``rate`` is the *quoted* rate, as papers write it; the equation uses ``momentum_delay`` times
    it.
    """

    rate: float = Field(gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    momentum_delay: int = Field(default=1, ge=1)
    momentum_share: float = Field(default=0.0, ge=0, le=1)

    @property
    def scaled_rate(self) -> float:
        """``lr`` of the equation: N times the quoted rate."""
        return self.momentum_delay * self.rate


class OuterTensors(NamedTuple):
    """One fragment of an outer optimizer's state; equal shapes."""

    theta: Tensor
    momentum: Tensor
    buffer: Tensor


def delayed_nesterov(
    now: OuterTensors, g: Tensor, *, step: int, settings: OuterSettings, out: OuterTensors
) -> None:
    """Apply pseudo-gradient ``g``, the ``step``-th received (from 1), as Liu et al. algorithm 3::

        buffer += g
        if step % N == 0:  m = beta*m + buffer/N
                           theta -= lr*((1 - c*N + c)*beta*m + g/N);  buffer = 0
        else:              theta -= lr*(c*beta*m + g/N)

    with ``lr = N * rate``. For N = 1 this is SGD with Nesterov momentum as torch has it.
    """
    delay, share, beta = settings.momentum_delay, settings.momentum_share, settings.momentum
    lr = settings.scaled_rate
    torch.add(now.buffer, g, out=out.buffer)
    if step % delay == 0:
        torch.mul(now.momentum, beta, out=out.momentum)
        out.momentum.add_(out.buffer, alpha=1 / delay)
        out.buffer.zero_()
        weight = 1 - share * delay + share
    else:
        if out.momentum is not now.momentum:
            out.momentum.copy_(now.momentum)
        weight = share
    torch.add(now.theta, g, alpha=-lr / delay, out=out.theta)
    if weight * beta:
        out.theta.add_(out.momentum, alpha=-lr * weight * beta)


def merge(theta: Tensor, model: Tensor, merge_weight: float, *, out: Tensor) -> None:
    """Blend the parent's model in (HALoS, section 4)::

    theta = (1 - alpha)*theta + alpha*model
    """
    torch.mul(theta, 1 - merge_weight, out=out)
    out.add_(model, alpha=merge_weight)


def carried_base(merged: Tensor, at_cut: Tensor, before_merge: Tensor, *, out: Tensor) -> None:
    """Base after a merge when work done since the cut is kept for the next push (``carry``)::

        base = theta_merged + (theta_at_cut - theta_before_merge)

    ``out`` must not be one of the inputs.
    """
    torch.sub(at_cut, before_merge, out=out)
    out.add_(merged)


def learning_rate(
    iteration: int, *, peak: float, warmup: int, total: int, floor_ratio: float = 0.1
) -> float:
    """Rate of inner step ``iteration`` (from 1) of the whole run: linear warm-up, then cosine.

    Reaches ``peak`` at ``warmup`` and ``floor_ratio * peak`` at ``total``, where it stays.
    """
    if iteration < warmup:
        return peak * iteration / warmup
    done = min(1.0, (iteration - warmup) / max(1, total - warmup))
    return peak * (floor_ratio + (1 - floor_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def learning_rate_iteration(progress: int, global_batch: int, inner_step: int) -> int:
    """Iteration of inner step ``inner_step`` (from 0) of a lease issued at ``progress`` samples."""
    return progress // global_batch + inner_step + 1
