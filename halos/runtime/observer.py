"""Evaluation beside a run: pulls the root's model when it is free, and reports the loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from torch import nn

from halos.core.fragments import Fragments, ModelLayout
from halos.errors import UserError
from halos.runtime.loop import LoopThread
from halos.runtime.parent import ParentLink
from halos.runtime.prepare import (
    PreparedData,
    prepare_data,
    prepare_model,
    specification_here,
)
from halos.specification import RunSpecification
from halos.training.constants import load_constants
from halos.training.corpus import Progress
from halos.training.evaluate import validation_loss
from halos.training.parameters import scatter
from halos.wire.chunks import Staging, check_manifest, layout_from
from halos.wire.frames import Evaluation, Fetch, Hello, Observe, Observed
from halos.wire.security import Security

T = TypeVar("T")

BATCH = 32  # sequences
ANSWER_S = 3600.0  # for a new model


@dataclass
class Observer:
    """Watches one run. Use :meth:`of`, and close it."""

    loop: LoopThread
    link: ParentLink
    specification: RunSpecification
    data: PreparedData
    model: nn.Module
    layout: ModelLayout
    stopping: threading.Event = field(default_factory=threading.Event)
    _waiting: Future[Any] | None = None

    @classmethod
    def of(
        cls,
        address: str,
        security: Security,
        data: Path | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Waits for the coordinator to be there. ``data`` as for ``halos.join``.

        Raises ``UserError``.
        """
        loop = LoopThread()
        link = ParentLink(loop, address, security, Hello("observer"))
        greeting = loop.run(link.greet())
        specification = specification_here(greeting.specification, data)
        samples = prepare_data(specification, progress)
        if samples.dataset is None:
            raise UserError("[data] dataset: has no validation set that halos can read")
        model = prepare_model(specification).module.eval()
        if greeting.layout.constants:
            load_constants(model, loop.run(link.constants()))
        return cls(loop, link, specification, samples, model, layout_from(greeting.layout))

    def follow(self, told: Callable[[Evaluation], None]) -> None:
        """Evaluate each newest model, no more often than the specification says, to the run's end.

        The last model is always evaluated. The run waits for nothing here. Returns early after
        :meth:`stop`.
        """
        after: int | None = None
        with suppress(CancelledError):
            while not self.stopping.is_set():
                began = time.monotonic()
                seen, payload = self._wait_for(self._next(after))
                if payload is not None and seen.version != after:
                    after = seen.version
                    evaluation = self._evaluate(seen, payload)
                    told(evaluation)
                    self._wait_for(self._report(evaluation))
                if seen.finished:
                    return
                self._rest(began + self.specification.evaluation.every_s)

    def stop(self) -> None:
        """Have :meth:`follow` return soon. Any thread may call this."""
        self.stopping.set()
        if self._waiting is not None:
            self._waiting.cancel()

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        self._waiting = waiting = self.loop.submit(work)
        if self.stopping.is_set():  # before it could be cancelled
            waiting.cancel()
        return waiting.result()

    def _rest(self, until: float) -> None:
        self.stopping.wait(max(0.0, until - time.monotonic()))

    def _evaluate(self, seen: Observed, payload: Fragments) -> Evaluation:
        assert self.data.dataset is not None
        samples = BATCH * self.specification.evaluation.batches
        scatter(self.model, self.layout, payload)
        loss = validation_loss(self.model, self.data.dataset, BATCH, samples)
        return Evaluation(
            version=seen.version,
            local_steps=seen.local_steps,
            tokens=seen.tokens,
            elapsed_s=seen.elapsed_s,
            loss=loss,
            samples=samples,
        )

    async def _next(self, after: int | None) -> tuple[Observed, Fragments | None]:
        """The next model; connects again as often as it takes."""
        while True:
            try:
                seen: Observed = await self._call("Observe", Observe(after, wait=True), ANSWER_S)
                if seen.transfer is None or seen.manifest is None:
                    return seen, None
                return seen, await self._download(seen)
            except grpc.aio.AioRpcError:
                await self.link.greet()

    async def _download(self, seen: Observed) -> Fragments:
        assert seen.transfer is not None and seen.manifest is not None
        if problem := check_manifest(seen.manifest, self.layout):
            raise UserError(f"{self.link.address}: sends what is not this run's model: {problem}")
        staging = Staging(seen.manifest)
        stream = self.link.stub(bulk=True).stream(
            "Download",
            Fetch(seen.transfer),
            metadata=self.link.metadata(),
            timeout=ANSWER_S,
        )
        async for chunk in stream:
            staging.add(chunk)
        return staging.take()

    async def _report(self, evaluation: Evaluation) -> None:
        try:
            await self._call("ReportEvaluation", evaluation, ANSWER_S)
        except grpc.aio.AioRpcError:
            await self.link.greet()

    def _call(self, name: str, request: Any, timeout_s: float) -> Any:
        return self.link.stub().call(
            name, request, metadata=self.link.metadata(), timeout=timeout_s
        )

    def close(self) -> None:
        self.link.stop()
        self.loop.close()
