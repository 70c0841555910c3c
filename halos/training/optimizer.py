"""The inner optimizer and its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.optim.adamw import adamw

from halos.core.equations import learning_rate
from halos.core.settings import Settings
from halos.errors import UserError

WARMUP_SHARE = 300 / 6144
"""Of the learning-rate schedule, as in the paper."""


class InnerSettings(Settings):
    """How a worker trains between two exchanges.

    Iterations are inner steps of the whole run, each of ``global_batch`` samples; the rate warms
    up over ``warmup_iterations`` and falls along a cosine to ``min_ratio`` of ``learning_rate`` at
    ``total_iterations``. On a worker's own first ``rewarm_steps`` it grows from zero on top of
    that, its moments being cold (0: off). ``gradient_clip`` bounds the gradient's norm (0: off).
    A batch is computed in ``accumulation`` parts.
    """

    learning_rate: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    gradient_clip: float = Field(default=1.0, ge=0)
    total_iterations: int | None = Field(default=None, ge=1)
    warmup_iterations: int | None = Field(default=None, ge=0)
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    rewarm_steps: int = Field(default=8, ge=0)
    accumulation: int = Field(default=1, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each is from 0 below 1")
        return betas

    @field_validator("warmup_iterations")
    @classmethod
    def _within_total(cls, warmup: int | None, info: ValidationInfo) -> int | None:
        total = info.data.get("total_iterations")
        if warmup is not None and total is not None and warmup > total:
            raise ValueError(f"is longer than total_iterations ({total})")
        return warmup

    def for_run(self, iterations: int) -> InnerSettings:
        """With the schedule as long as the run, where it is left open. ``UserError`` if the
        warm-up is longer than that."""
        total = self.total_iterations or iterations
        warmup = self.warmup_iterations
        if warmup is None:
            warmup = round(WARMUP_SHARE * total)
        if warmup > total:
            raise UserError(
                f"[inner] warmup_iterations: {warmup} is not allowed; give at most {total}, "
                "the iterations of the whole run"
            )
        return self.model_copy(update={"total_iterations": total, "warmup_iterations": warmup})

    def rate(self, iteration: int) -> float:
        """Of inner step ``iteration`` (from 1) of the run. Needs the schedule's length."""
        if self.total_iterations is None or self.warmup_iterations is None:
            raise ValueError("the schedule has no length yet: call InnerSettings.for_run")
        return learning_rate(
            iteration,
            peak=self.learning_rate,
            warmup=self.warmup_iterations,
            total=self.total_iterations,
            floor_ratio=self.min_ratio,
        )


class InnerOptimizer(Protocol):
    """What a replica asks of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As in torch: what a ``GradScaler`` looks at."""
        ...

    def step(self, learning_rate: float) -> object: ...

    def zero_grad(self) -> None: ...

    def state(self) -> dict[str, Tensor]:
        """All that it remembers, by name: the state itself, not a copy."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy in what :meth:`state` gave. Raises ``ValueError`` if it is another model's."""
        ...


class Scaler(Protocol):
    """What is used of ``torch.amp.GradScaler``."""

    def unscale_(self, optimizer: Any) -> None: ...

    def step(self, optimizer: Any, learning_rate: float) -> object: ...

    def update(self) -> None: ...


class AdamW:
    """AdamW (Loshchilov & Hutter 2019) with decay on matrices only, its state there from the start.

    Torch's own kernel without ``torch.optim.Optimizer`` around it: making one of those imports
    torch's compiler, which costs every process two seconds.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], settings: InnerSettings) -> None:
        self.settings = settings
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.step_count = {
            name: torch.zeros((), dtype=torch.float32, device=p.device)
            for name, p in self.parameters.items()
        }
        self.exp_avg = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        # The fused kernel runs through memory as if there were no strides.
        self._fused = all(p.is_contiguous() for p in self.parameters.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.parameters.values())}]

    def step(self, learning_rate: float) -> None:
        """One step with the gradients that there are; parameters without one stay."""
        ready = [name for name, p in self.parameters.items() if p.grad is not None]
        for matrices in (True, False):
            chosen = [name for name in ready if (self.parameters[name].ndim >= 2) is matrices]
            if chosen:
                decay = self.settings.weight_decay if matrices else 0.0
                self._update(chosen, learning_rate, decay)

    @torch.no_grad()
    def _update(self, names: list[str], learning_rate: float, decay: float) -> None:
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [self.exp_avg[name] for name in names],
            [self.exp_avg_sq[name] for name in names],
            [],
            [self.step_count[name] for name in names],
            foreach=False,
            fused=self._fused,
            amsgrad=False,
            maximize=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=learning_rate,
            weight_decay=decay,
            eps=self.settings.eps,
        )

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """The state itself, not a copy, by kind and parameter."""
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in (
                ("step", self.step_count),
                ("exp_avg", self.exp_avg),
                ("exp_avg_sq", self.exp_avg_sq),
            )
            for name, tensor in tensors.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        mine = self.state()
        if {k: t.shape for k, t in state.items()} != {k: t.shape for k, t in mine.items()}:
            raise ValueError("this training state belongs to another model")
        for name, tensor in mine.items():
            tensor.copy_(state[name])


def build_optimizer(model: nn.Module, settings: InnerSettings) -> AdamW:
    """For the model's trainable parameters, tied ones once, where they are now."""
    return AdamW(model.named_parameters(), settings)
