"""The inner loop: local steps on leased samples, and the pseudo-gradient that they amount to."""

from __future__ import annotations

import threading

import torch
from torch import nn

from halos.core.fragments import ModelLayout
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.errors import Interrupted, UserError
from halos.training.data import Dataset, SampleOrder
from halos.training.loss import TrainingLoss
from halos.training.optimizer import InnerSettings
from halos.training.replica import Part, Replica


class LocalTrainer(Replica):
    """A replica with its data, and the loop that trains it. One thread at a time calls ``run``.

    ``stop`` may be replaced by an event of the caller's.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        dataset: Dataset,
        order: SampleOrder,
        settings: InnerSettings,
        global_batch: int,
    ) -> None:
        """Takes ``model`` over and moves it to the device. ``global_batch`` in samples."""
        super().__init__(
            model.to(resolve_device(settings.device)),
            layout,
            settings,
            global_batch=global_batch,
            tokens_a_sample=dataset.sequence_length,
        )
        self.dataset = dataset
        self.order = order
        self.stop = threading.Event()
        self._loss = TrainingLoss(model, settings)

    def run(self, job: RunLocalSteps) -> LocalStepsDone:
        """Train on the whole lease, ``batch_size`` samples a step, from the job's parameters.

        Raises :class:`Interrupted` between two steps once ``stop`` is set. After that, any other
        exception and numbers that are not finite the moments are those of before the round.
        """
        self.begin(job)
        try:
            while (part := self.part) is not None:
                if part.starts_step and self.stop.is_set():
                    raise Interrupted(job.lease.id)
                self._train(part)
            return self.finish()
        finally:
            self.give_up()

    def _train(self, part: Part) -> None:
        batch = self.dataset.batch(self.order.indices(part.positions))
        tokens, targets = (t.to(self.device) for t in batch)
        loss = self._loss(tokens, targets)
        if part.accumulation != 1:
            loss = loss / part.accumulation
        torch.autograd.backward(loss)
        self.step(loss)


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is some. ``UserError`` if CUDA is asked for in vain."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("inner.device is cuda, but torch finds no CUDA device: set it to cpu")
    return torch.device(name)
