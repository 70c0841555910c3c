"""A worker's part in a run, for a training loop of anybody's own (DESIGN 11)::

for batch in run.batches(dataset):
    loss = model(**batch).loss / run.accumulation
    loss.backward()
    run.step(loss)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from halos.errors import UserError
from halos.runtime.handover import Handover
from halos.runtime.prepare import PreparedData, prepare_model, replica_of
from halos.specification import RunSpecification
from halos.training.inner import resolve_device
from halos.training.loss import TrainingLoss
from halos.training.optimizer import Scaler
from halos.training.replica import Replica

Collate = Callable[[list[Any]], Any]
Fetch = Callable[[npt.NDArray[np.int64]], Any]


class Samples(Protocol):
    """A map-style data set, as torch calls it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Run:
    """What a loop needs of a run. ``halos.join`` makes one; one thread at a time uses it.

    The run owns what is the same for all its workers: the samples, the learning rate, clipping,
    accumulation and when to exchange. The model and the optimizer stay the loop's.
    """

    def __init__(
        self,
        handover: Handover,
        replica: Replica,
        specification: RunSpecification,
        data: PreparedData,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.specification = specification
        self.progress = 0
        self.name = ""  # of this worker, where it was joined by one
        self.rounds = 0  # handed over
        self._handover = handover
        self._replica = replica
        self._data = data
        self._on_close = on_close
        self._batch_size = specification.training.batch_size
        self._loss: TrainingLoss | None = None

    @classmethod
    def of(
        cls,
        handover: Handover,
        specification: RunSpecification,
        data: PreparedData,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> Run:
        """With the loop's own ``model`` where it is, or that of the specification on its device.

        Without ``optimizer`` the specification's AdamW. Raises ``UserError``.
        """
        if model is None:
            if optimizer is not None:
                raise UserError("optimizer: is given without its model; give both, or neither")
            device = resolve_device(specification.inner.device)
            model = prepare_model(specification).module.to(device)
        replica = replica_of(specification, data, model, optimizer)
        return cls(handover, replica, specification, data, on_close)

    # ------------------------------------------------------------ the loop

    def batches(
        self, dataset: Samples | None = None, collate: Collate | None = None
    ) -> Iterator[Any]:
        """Batches of the samples that this worker is leased, on the model's device, until the run
        is over or left. Waits for each lease, and exchanges models where one ends.

        Without ``dataset`` the run's own: (tokens, targets), int64 [n, T] each, targets one token
        further. With one, its items by number as ``collate`` makes a batch of them, by default
        torch's ``default_collate``. Call :meth:`step` once for each batch.

        Raises ``UserError`` if the data set is not the run's.
        """
        fetch = self._own() if dataset is None else self._borrowed(dataset, collate)
        return self._batches(fetch)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The model's mean loss in nats a token, in the run's precision."""
        if self._loss is None:
            self._loss = TrainingLoss(self._replica.model, self._replica.settings)
        return self._loss(tokens, targets)

    def step(self, loss: Tensor, scaler: Scaler | None = None) -> None:
        """After ``loss.backward()``, for each batch; ``loss`` was divided by :attr:`accumulation`.

        Where a local step ends: clips gradients, sets the rate, steps the optimizer, zeroes the
        gradients. Where a lease ends: hands the change of the parameters over. With mixed
        precision in fp16 give the ``scaler`` that scaled the backward pass, and ``loss`` unscaled.
        """
        if self._replica.part is None:
            raise UserError("run.step: there is no batch; call it once for each of run.batches")
        if self._handover.wanted:
            self._replica.step(loss, scaler)
            self._hand_over()
        else:
            self._replica.give_up()

    # ------------------------------------------------------------ what there is to know

    @property
    def model(self) -> nn.Module:
        return self._replica.model

    @property
    def replica(self) -> Replica:
        return self._replica

    @property
    def accumulation(self) -> float:
        """What this batch's mean loss is to be divided by, so that those of a step add up."""
        part = self._replica.part
        return part.accumulation if part is not None else self._replica.settings.accumulation

    @property
    def batch_size(self) -> int:
        """Samples a local step of this worker."""
        return self._batch_size

    @property
    def total_samples(self) -> int:
        """What the whole run trains on. ``progress`` is how many of them had been issued when
        this worker's lease was."""
        return self.specification.total_samples(self._data.samples)

    @property
    def finished(self) -> bool:
        """Whether the whole run is over, rather than left."""
        return self._handover.finished

    @property
    def device(self) -> torch.device:
        return self._replica.device

    def stop(self) -> None:
        """Have :meth:`batches` end soon. Safe in any thread, and in a signal handler."""
        self._handover.close()

    def close(self) -> None:
        """Leave the run; the samples of an unfinished lease go to another worker."""
        self._handover.close()
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ behind it

    def _batches(self, fetch: Fetch) -> Iterator[Any]:
        replica = self._replica
        while (job := self._handover.next()) is not None:
            self.progress, self._batch_size = job.lease.progress, job.batch_size
            replica.begin(job)
            try:
                self._hand_over()  # a lease may be empty
                while self._handover.wanted and (part := replica.part) is not None:
                    yield fetch(self._data.order.indices(part.positions))
                    if replica.part is part:
                        raise UserError("run.step: was not called for the last batch")
            finally:
                replica.give_up()

    def _hand_over(self) -> None:
        if self._replica.part is None:
            self._handover.done(self._replica.finish())
            self.rounds += 1

    def _own(self) -> Fetch:
        dataset, device = self._data.dataset, self._replica.device
        if dataset is None:
            raise UserError(
                "run.batches: this run has no data of its own; give it your data set of "
                f"{self._data.samples} samples"
            )
        return lambda indices: moved(dataset.batch(indices), device)

    def _borrowed(self, dataset: Samples, collate: Collate | None) -> Fetch:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"run.batches: {type(dataset).__name__} has no len() or no [index], and samples "
                "are leased by number; give a map-style data set"
            )
        if len(dataset) != self._data.samples:
            raise UserError(
                f"run.batches: this data set has {len(dataset)} samples, but that of the run has "
                f"{self._data.samples}; give the same one on every machine"
            )
        device, gather = self._replica.device, collate or default_collation()
        several = getattr(dataset, "__getitems__", None)

        def fetch(indices: npt.NDArray[np.int64]) -> Any:
            chosen = indices.tolist()
            items = several(chosen) if several is not None else [dataset[i] for i in chosen]
            return moved(gather(items), device)

        return fetch


def default_collation() -> Collate:
    from torch.utils.data import default_collate

    collate: Collate = default_collate
    return collate


def moved(batch: Any, device: torch.device) -> Any:
    """``batch`` with all tensors in it on ``device``."""
    match batch:
        case Tensor():
            return batch.to(device, non_blocking=True)
        case Mapping():
            return {key: moved(value, device) for key, value in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(moved(value, device) for value in batch))
        case tuple() | list():
            return type(batch)(moved(value, device) for value in batch)
    return batch
