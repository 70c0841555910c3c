"""A server's tensors: parameters, outer optimizer and base, shared without being torn.

What has been handed out (a download, a snapshot, the cut of a push) is never written to: while
somebody holds it, the next write goes to other buffers, and its own are used again once everybody
let go. So nothing is copied for readers, and a snapshot needs no stop (DESIGN 3).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halos.core.equations import OuterSettings, OuterTensors, carried_base, delayed_nesterov, merge
from halos.core.fragments import Fragments
from halos.core.tensors import Payload, RefusalReason


class Shared:
    """Fragments of one writer and any number of readers, copied on write.

    Readers hold :class:`Fragments`; to hold only its tensors protects nothing.
    """

    def __init__(self, content: Fragments) -> None:
        self._tensors = list(content.tensors)
        self._held: weakref.ref[Fragments] | None = weakref.ref(content)
        self._retired: list[tuple[Callable[[], Fragments | None], list[Tensor]]] = []

    def read(self) -> Fragments:
        """The present content; stays as it is whatever is written later."""
        held = self._held() if self._held is not None else None
        if held is None:
            held = Fragments(self._tensors)
            self._held = weakref.ref(held)
        return held

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def write(self) -> list[Tensor]:
        """Tensors to write the next content into: all of each must be written.

        They are the present ones when nobody holds those, so that an update in place costs no
        memory; read what is needed of the present content before asking.
        """
        if self._held is not None and self._held() is not None:
            self._retired.append((self._held, self._tensors))
            self._tensors = self._recycle() or [torch.empty_like(t) for t in self._tensors]
        self._held = None
        return self._tensors

    def _recycle(self) -> list[Tensor] | None:
        free = [tensors for held, tensors in self._retired if held() is None]
        self._retired = [entry for entry in self._retired if entry[0]() is not None]
        # One more is kept for the next reader; what is beyond goes back to the system.
        self._retired += [(_nobody, tensors) for tensors in free[1:2]]
        return free[0] if free else None


def _nobody() -> None:
    """Holds nothing, in the place of a reference to who held a buffer."""


@dataclass
class TorchState:
    """The tensor state of production (``TensorState``).

    ``base`` and what belongs to pushing exist at a server with a parent only. ``step`` counts the
    updates applied, which delayed Nesterov needs.
    """

    theta: Shared
    momentum: Shared
    buffer: Shared
    settings: OuterSettings
    base: Shared | None = None
    step: int = 0
    at_cut: Fragments | None = field(default=None, repr=False)

    @classmethod
    def start(cls, model: Fragments, settings: OuterSettings, *, has_parent: bool) -> TorchState:
        """From parameters, with an outer optimizer at rest."""
        return cls(
            theta=Shared(model.copy()),
            momentum=Shared(Fragments([torch.zeros_like(t) for t in model.tensors])),
            buffer=Shared(Fragments([torch.zeros_like(t) for t in model.tensors])),
            settings=settings,
            base=Shared(model.copy()) if has_parent else None,
        )

    def check(self, payload: Payload) -> RefusalReason | None:
        if not isinstance(payload, Fragments) or len(payload.tensors) != len(list(self.theta)):
            return "wrong_shape"
        for mine, theirs in zip(self.theta, payload.tensors, strict=True):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return "wrong_shape"
        # A norm is finite only if every term is, and far from overflow: one pass, no mask.
        if not all(torch.linalg.vector_norm(t).isfinite() for t in payload.tensors):
            return "non_finite"
        return None

    def apply(self, pseudo_gradient: Payload) -> None:
        assert isinstance(pseudo_gradient, Fragments)
        self.step += 1
        now = list(zip(self.theta, self.momentum, self.buffer, strict=True))
        out = zip(self.theta.write(), self.momentum.write(), self.buffer.write(), strict=True)
        for before, g, after in zip(now, pseudo_gradient.tensors, out, strict=True):
            delayed_nesterov(
                OuterTensors(*before),
                g,
                step=self.step,
                settings=self.settings,
                out=OuterTensors(*after),
            )

    def cut(self) -> Fragments:
        assert self.base is not None
        self.at_cut = self.theta.read()
        return Fragments([b - t for b, t in zip(self.base, self.theta, strict=True)])

    def blend(self, model: Payload, *, merge_weight: float, carry: bool) -> None:
        assert isinstance(model, Fragments) and self.base is not None and self.at_cut is not None
        before = self.theta.read() if carry else None  # held, so that the merge is out of place
        thetas = list(self.theta)
        for theta, q, out in zip(thetas, model.tensors, self.theta.write(), strict=True):
            merge(theta, q, merge_weight, out=out)
        at_cut, self.at_cut = self.at_cut, None
        bases = self.base.write()
        if before is None:
            for merged, out in zip(self.theta, bases, strict=True):
                out.copy_(merged)
            return
        parts = zip(self.theta, at_cut.tensors, before.tensors, bases, strict=True)
        for merged, cut, theta, out in parts:
            carried_base(merged, cut, theta, out=out)

    def adopt(self, model: Payload) -> None:
        assert isinstance(model, Fragments)
        self.step, self.at_cut = 0, None
        for held in (self.theta, self.base):
            for source, out in zip(model.tensors, held.write() if held else [], strict=False):
                out.copy_(source)
        for out in (*self.momentum.write(), *self.buffer.write()):
            out.zero_()

    def publish(self) -> Fragments:
        return self.theta.read()

    def capture(self) -> dict[str, Fragments]:
        """Everything that a checkpoint keeps, held but not copied. ``step`` is kept apart."""
        parts = {
            "theta": self.theta.read(),
            "momentum": self.momentum.read(),
            "buffer": self.buffer.read(),
        }
        if self.base is not None:
            parts["base"] = self.base.read()
        if self.at_cut is not None:
            parts["at_cut"] = self.at_cut
        return parts

    @classmethod
    def restore(
        cls, parts: dict[str, Fragments], settings: OuterSettings, *, step: int
    ) -> TorchState:
        """From what :meth:`capture` gave."""
        base = parts.get("base")
        return cls(
            theta=Shared(parts["theta"]),
            momentum=Shared(parts["momentum"]),
            buffer=Shared(parts["buffer"]),
            settings=settings,
            base=Shared(base) if base else None,
            step=step,
            at_cut=parts.get("at_cut"),
        )
