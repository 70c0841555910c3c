"""One worker's replica: the model it trains, its optimizer, and the rounds that it is given."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from halos.core.equations import learning_rate_iteration
from halos.core.fragments import Fragments, ModelLayout
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.core.samples import Lease
from halos.training.optimizer import InnerOptimizer, InnerSettings, Scaler, build_optimizer
from halos.training.parameters import difference, l2_norm, scatter

OWN_STEPS = "own_steps"


@dataclass(frozen=True, slots=True)
class Part:
    """What one backward pass is made of: positions of samples in their data set's sequence.

    ``of`` is the number of samples in the whole local step, ``ends_step`` whether this is its last
    part.
    """

    positions: npt.NDArray[np.int64]
    of: int
    starts_step: bool
    ends_step: bool

    @property
    def accumulation(self) -> float:
        """What the mean loss of this part is divided by, so that the parts of a step add up."""
        return self.of / len(self.positions)


@dataclass
class _Round:
    job: RunLocalSteps
    start: Fragments
    parts: list[Part]
    loss: Tensor  # sum over samples
    began: float = field(default_factory=time.perf_counter)
    at: int = 0  # parts done
    steps: int = 0


class Replica:
    """Trains rounds: :meth:`begin`, then for each :attr:`part` backward and :meth:`step`, then
    :meth:`finish`.

    One thread at a time trains. Moments stay between rounds while parameters come with each job.
    A round that is not finished never was: :meth:`give_up` returns to its start. The same jobs
    give the same bits on a CPU: nothing here draws random numbers, and a model that does (dropout)
    has to count them from its own state.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        settings: InnerSettings,
        *,
        global_batch: int,
        tokens_a_sample: int,
        optimizer: InnerOptimizer | None = None,
    ) -> None:
        """``model`` stays on its device. Without ``optimizer``, AdamW as ``settings`` say.

        ``global_batch`` in samples.
        """
        self.model = model
        self.layout = layout
        self.settings = settings
        self.global_batch = global_batch
        self.tokens_a_sample = tokens_a_sample
        self.optimizer = optimizer or build_optimizer(model, settings)
        self.device = device_of(model)
        self.own_steps = 0
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._lock = threading.Lock()
        self._round: _Round | None = None
        self._round_lease = ""
        self._round_start: dict[str, Tensor] = {}
        self._keep()

    def begin(self, job: RunLocalSteps) -> None:
        """Take the job's parameters. ``TypeError`` or ``ValueError`` if they do not fit."""
        start = job.payload
        if not isinstance(start, Fragments):
            raise TypeError(f"training needs parameters, not a {type(start).__name__}")
        parts = parts_of(job, self.settings.accumulation)
        scatter(self.model, self.layout, start)
        self.optimizer.zero_grad()
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._lock:
            self._keep()
            self._round_lease = job.lease.id
            self._round = _Round(job, start, parts, loss)

    @property
    def part(self) -> Part | None:
        """What is to be trained on next; ``None`` at the end of a round and outside of one."""
        now = self._round
        return now.parts[now.at] if now is not None and now.at < len(now.parts) else None

    def step(self, loss: Tensor, scaler: Scaler | None = None) -> None:
        """Call it after the backward pass of :attr:`part`; ``loss`` is its mean loss divided by
        :attr:`Part.accumulation`.

        At the end of a local step: clip, set the rate, step the optimizer, zero the gradients.
        ``scaler`` is the ``GradScaler`` that scaled the backward pass, if any.
        """
        now, part = self._round, self.part
        if now is None or part is None:
            raise ValueError("step: there is no batch that this belongs to")
        now.loss += loss.detach() * part.of
        now.at += 1
        if part.ends_step:
            self._update(self._rate(now.job.lease.progress, now.steps), scaler)
            now.steps += 1

    def finish(self) -> LocalStepsDone:
        """The round's pseudo-gradient. If it is not finite, the moments are those of before."""
        now = self._round
        if now is None or self.part is not None:
            raise ValueError("finish: the round is not at its end")
        change = difference(now.start, self.model, self.layout)
        norm = l2_norm(change)
        samples = now.job.lease.samples
        done = LocalStepsDone(
            lease=now.job.lease.id,
            local_steps=now.steps,
            tokens=samples * self.tokens_a_sample,
            loss=float(now.loss) / max(1, samples),
            norm=norm,
            seconds=time.perf_counter() - now.began,
            payload=change,
        )
        if not math.isfinite(norm):
            self._return_to_round_start()
        self._round = None
        return done

    def give_up(self) -> None:
        """The round that was begun, if any, never was."""
        if self._round is not None:
            self._return_to_round_start()
            self._round = None

    def _update(self, rate: float, scaler: Scaler | None) -> None:
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.settings.gradient_clip:
            nn.utils.clip_grad_norm_(self._trained, self.settings.gradient_clip)
        if scaler is None:
            self.optimizer.step(rate)
        else:
            scaler.step(self.optimizer, rate)
            scaler.update()
        self.optimizer.zero_grad()
        self.own_steps += 1

    def _rate(self, progress: int, step: int) -> float:
        """The run's rate at this step, less while this worker's own moments are cold."""
        iteration = learning_rate_iteration(progress, self.global_batch, step)
        rate = self.settings.rate(iteration)
        return rate * min(1.0, (self.own_steps + 1) / max(1, self.settings.rewarm_steps))

    # What a checkpoint keeps. Parameters are not part of it: each round brings its own.

    def capture(self, *, before: str | None) -> dict[str, Tensor]:
        """A copy of optimizer state and counters, on the CPU. Any thread may ask at any time.

        ``before`` is the lease whose result nobody has taken yet, if any: the state is that of
        before its round, whether that is still to begin, runs, or has just ended. A round of
        another lease that still runs has been abandoned, and counts as never begun.
        """
        with self._lock:
            undone = before is not None and before == self._round_lease
            state = self._round_start if self._round is not None or undone else self._state()
            return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}

    def undo(self, lease: str) -> None:
        """Forget the round of ``lease``, if it was the last one: its result is not wanted."""
        with self._lock:
            if self._round_lease != lease:
                return
            self._round_lease = ""
        self._return_to_round_start()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`capture` gave. Raises ``ValueError`` if it is another model's."""
        if OWN_STEPS not in state:
            raise ValueError("this training state belongs to another model")
        with self._lock:
            self.optimizer.load({k: t for k, t in state.items() if k != OWN_STEPS})
            self.own_steps = int(state[OWN_STEPS])
            self._keep()

    def _keep(self) -> None:
        """Copy the state as of now into memory that is used again, which fresh memory costs."""
        kept = {}
        for name, tensor in self._state().items():
            to = self._round_start.get(name)
            if to is None or (to.shape, to.dtype) != (tensor.shape, tensor.dtype):
                to = torch.empty_like(tensor, device="cpu")
            kept[name] = to.copy_(tensor)
        self._round_start = kept

    def _state(self) -> dict[str, Tensor]:
        return {**self.optimizer.state(), OWN_STEPS: torch.tensor(self.own_steps)}

    def _return_to_round_start(self) -> None:
        self.optimizer.load({k: t for k, t in self._round_start.items() if k != OWN_STEPS})
        self.own_steps = int(self._round_start[OWN_STEPS])
        self.optimizer.zero_grad()


def parts_of(job: RunLocalSteps, accumulation: int) -> list[Part]:
    """The lease's samples, ``batch_size`` a local step, each step in up to ``accumulation`` parts.

    Raises ``ValueError`` if they are more than the job has steps for.
    """
    positions = positions_of(job.lease)
    steps = math.ceil(len(positions) / job.batch_size)
    if steps > job.local_steps:
        raise ValueError(
            f"lease {job.lease.id} holds {len(positions)} samples, more than "
            f"{job.local_steps} steps of {job.batch_size}"
        )
    found = []
    for at in range(0, len(positions), job.batch_size):
        whole = positions[at : at + job.batch_size]
        split = np.array_split(whole, min(accumulation, len(whole)))
        last = len(split) - 1
        found += [Part(p, len(whole), i == 0, i == last) for i, p in enumerate(split)]
    return found


def positions_of(lease: Lease) -> npt.NDArray[np.int64]:
    """The lease's samples as positions in its data set's own sequence, in order."""
    ranges = [np.arange(start, end, dtype=np.int64) for start, end in lease.ranges]
    return np.concatenate([np.empty(0, dtype=np.int64), *ranges]) - lease.origin


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is."""
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
