"""The inner loop: local steps on leased samples, and the pseudo-gradient that they amount to."""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from halos.core.equations import learning_rate_iteration
from halos.core.fragments import Fragments, ModelLayout
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.core.samples import Lease
from halos.errors import Interrupted, UserError
from halos.training.data import Dataset, SampleOrder
from halos.training.model import LanguageModel
from halos.training.optimizer import InnerSettings, build_optimizer
from halos.training.parameters import difference, l2_norm, scatter

OWN_STEPS = "own_steps"


class LocalTrainer:
    """One worker's replica: model, inner optimizer and data. One thread at a time calls ``run``.

    The moments stay between rounds while parameters come with each job. The same jobs give the
    same bits on a CPU: nothing here draws random numbers, and a model that does (dropout) has to
    count them from its own state. ``stop`` may be replaced by an event of the caller's.
    """

    def __init__(
        self,
        model: LanguageModel,
        layout: ModelLayout,
        dataset: Dataset,
        order: SampleOrder,
        settings: InnerSettings,
        global_batch: int,
    ) -> None:
        """Takes ``model`` over and moves it to the device. ``global_batch`` in samples."""
        self.device = resolve_device(settings.device)
        self.model = model.to(self.device)
        self.layout = layout
        self.dataset = dataset
        self.order = order
        self.settings = settings
        self.global_batch = global_batch
        self.stop = threading.Event()
        self.optimizer = build_optimizer(model, settings)
        self.own_steps = 0
        self._loss = torch.compile(model.loss) if settings.compile else model.loss
        self._lock = threading.Lock()
        self._running = False
        self._round_start = self._copy()
        self._round_lease = ""

    def run(self, job: RunLocalSteps) -> LocalStepsDone:
        """Train on the whole lease, ``batch_size`` samples a step, from the job's parameters.

        Raises :class:`Interrupted` between two steps once ``stop`` is set. After that, any other
        exception and numbers that are not finite the moments are those of before the round.
        """
        began = time.perf_counter()
        start = job.payload
        if not isinstance(start, Fragments):
            raise TypeError(f"training needs parameters, not a {type(start).__name__}")
        self._begin_round(job.lease.id)
        try:
            scatter(self.model, self.layout, start)
            steps, loss = self._train(job)
            change = difference(start, self.model, self.layout)
            norm = l2_norm(change)
            if not math.isfinite(norm):
                self._return_to_round_start()
        except BaseException:
            self._return_to_round_start()
            raise
        finally:
            self._running = False
        return LocalStepsDone(
            lease=job.lease.id,
            local_steps=steps,
            tokens=job.lease.samples * self.dataset.sequence_length,
            loss=loss,
            norm=norm,
            seconds=time.perf_counter() - began,
            payload=change,
        )

    def _train(self, job: RunLocalSteps) -> tuple[int, float]:
        """Local steps done, and their mean loss in nats a token."""
        self.model.train()
        indices = self.order.indices(positions_of(job.lease))
        steps = math.ceil(len(indices) / job.batch_size)
        if steps > job.local_steps:
            raise ValueError(
                f"lease {job.lease.id} holds {len(indices)} samples, more than "
                f"{job.local_steps} steps of {job.batch_size}"
            )
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for step in range(steps):
            if self.stop.is_set():
                raise Interrupted(job.lease.id)
            batch = indices[step * job.batch_size : (step + 1) * job.batch_size]
            loss += self._step(batch, self._rate(job.lease.progress, step))
        return steps, float(loss) / max(1, len(indices))

    def _step(self, indices: npt.NDArray[np.int64], rate: float) -> Tensor:
        """One optimizer step. Returns the sum over samples of their mean loss."""
        summed = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in np.array_split(indices, min(self.settings.accumulation, len(indices))):
            tokens, targets = (t.to(self.device) for t in self.dataset.batch(part))
            with self._precision():
                loss = self._loss(tokens, targets)
            share = len(part) / len(indices)
            torch.autograd.backward(loss if share == 1 else loss * share)
            summed += loss.detach() * len(part)
        if self.settings.gradient_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        self.optimizer.step(rate)
        self.optimizer.zero_grad()
        self.own_steps += 1
        return summed

    def _rate(self, progress: int, step: int) -> float:
        """The run's rate at this step, less while this worker's own moments are cold."""
        iteration = learning_rate_iteration(progress, self.global_batch, step)
        rate = self.settings.rate(iteration)
        return rate * min(1.0, (self.own_steps + 1) / max(1, self.settings.rewarm_steps))

    def _precision(self) -> AbstractContextManager[object]:
        if self.settings.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    # What a checkpoint keeps. Parameters are not part of it: each round brings its own.

    def capture(self, *, before: str | None) -> dict[str, Tensor]:
        """A copy of optimizer state and counters, on the CPU. Any thread may ask at any time.

        ``before`` is the lease whose result nobody has taken yet, if any: the state is that of
        before its round, whether that is still to begin, runs, or has just ended. A round of
        another lease that still runs has been abandoned, and counts as never begun.
        """
        with self._lock:
            if self._running or (before is not None and before == self._round_lease):
                return {name: tensor.clone() for name, tensor in self._round_start.items()}
            return self._copy()

    def undo(self, lease: str) -> None:
        """Forget the round of ``lease``, if it was the last one: its result is not wanted."""
        with self._lock:
            if self._round_lease != lease:
                return
            self._round_lease = ""
        self._return_to_round_start()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`capture` gave. Raises ``ValueError`` if it is another model's."""
        with self._lock:
            if {k: t.shape for k, t in state.items()} != {
                k: t.shape for k, t in self._round_start.items()
            }:
                raise ValueError("this training state belongs to another model")
            for name, tensor in state.items():
                self._round_start[name].copy_(tensor)
        self._return_to_round_start()

    def _copy(self) -> dict[str, Tensor]:
        state = {k: t.to("cpu", copy=True) for k, t in self.optimizer.state().items()}
        return {**state, OWN_STEPS: torch.tensor(self.own_steps)}

    def _begin_round(self, lease: str) -> None:
        with self._lock:
            self._running = True
            self._round_lease = lease
            for name, tensor in self.optimizer.state().items():
                self._round_start[name].copy_(tensor)
            self._round_start[OWN_STEPS].fill_(self.own_steps)

    def _return_to_round_start(self) -> None:
        for name, tensor in self.optimizer.state().items():
            tensor.copy_(self._round_start[name])
        self.own_steps = int(self._round_start[OWN_STEPS])
        self.optimizer.zero_grad()


def positions_of(lease: Lease) -> npt.NDArray[np.int64]:
    """The lease's samples as positions in its data set's own sequence, in order."""
    ranges = [np.arange(start, end, dtype=np.int64) for start, end in lease.ranges]
    return np.concatenate([np.empty(0, dtype=np.int64), *ranges]) - lease.origin


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is some. ``UserError`` if CUDA is asked for in vain."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("inner.device is cuda, but torch finds no CUDA device: set it to cpu")
    return torch.device(name)
