"""A server's tensors: parameters, outer optimizer and base, shared without being torn.

What has been handed out (a download, a snapshot, the cut of a push) is never written to: while
somebody holds it, the next write goes to other buffers, and its own are used again once everybody
let go. So nothing is copied for readers, and a snapshot needs no stop (DESIGN 3).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halos.core.equations import OuterSettings, OuterTensors, carried_base, delayed_nesterov, merge
from halos.core.fragments import Fragments
from halos.core.tensors import Payload, RefusalReason

Rounding = Callable[[Tensor], Tensor]
"""What arrives of a fragment's values over a link that rounds them."""


@dataclass(frozen=True)
class Roundings:
    """What links between servers do to a push, and to the difference between two models.

    ``None``: nothing; then no push loses anything, and models come whole.
    """

    push: Rounding | None = None
    difference: Rounding | None = None


EXACT = Roundings()
SHADOW = "shadow"  # of a server's own, in a capture; those of its children bear their names


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


class Shadow:
    """A model that both ends of a link hold, bit by bit; ``number`` is a checksum of it."""

    def __init__(self, model: Fragments) -> None:
        self.content = Shared(model.copy())
        self.number = checksum(self.content)

    def advance(self, difference: Iterable[Tensor]) -> Fragments:
        """Add what arrived of a difference: the model that both ends hold now."""
        known = list(self.content)
        for before, change, out in zip(known, difference, self.content.write(), strict=True):
            torch.add(before, change, out=out)
        self.number = checksum(self.content)
        return self.content.read()


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of 32 bits: the sum of each fragment's words, all these together by CRC."""
    sums = [int(t.view(torch.int32).sum()) for t in tensors]
    return zlib.crc32(b"".join((s % 2**64).to_bytes(8, "little") for s in sums))


@dataclass
class TorchState:
    """The tensor state of production (``TensorState``).

    ``base`` and what belongs to pushing exist at a server with a parent only. ``step`` counts the
    updates applied, which delayed Nesterov needs.

    Where ``links`` round pushes, what one loses goes into the next (error feedback, Seide et al.
    2014). Where they round differences between models, both ends hold a ``shadow``, the sum of
    what arrived; so what one difference loses is in the next.
    """

    theta: Shared
    momentum: Shared
    buffer: Shared
    settings: OuterSettings
    base: Shared | None = None
    step: int = 0
    at_cut: Fragments | None = field(default=None, repr=False)
    links: Roundings = EXACT
    sent: Fragments | None = field(default=None, repr=False)  # the push in flight, if it is rounded
    lost: Shared | None = None  # by the pushes before
    shadow: Shadow | None = None
    shadows: dict[str, Shadow] = field(default_factory=dict)  # of child servers

    @classmethod
    def start(
        cls,
        model: Fragments,
        settings: OuterSettings,
        links: Roundings = EXACT,
        *,
        has_parent: bool,
    ) -> TorchState:
        """From parameters, with an outer optimizer at rest."""
        return cls(
            theta=Shared(model.copy()),
            momentum=Shared(Fragments([torch.zeros_like(t) for t in model.tensors])),
            buffer=Shared(Fragments([torch.zeros_like(t) for t in model.tensors])),
            settings=settings,
            base=Shared(model.copy()) if has_parent else None,
            links=links,
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
        change = Fragments([b - t for b, t in zip(self.base, self.theta, strict=True)])
        if self.lost is not None:
            for wanted, lost in zip(change.tensors, self.lost, strict=True):
                wanted += lost
        self.sent = change if self.links.push is not None or self.lost is not None else None
        return change

    def _settle(self) -> None:
        """The push in flight arrived: only what it lost is to be sent again."""
        sent, self.sent = self.sent, None
        arrives = self.links.push
        if sent is None:
            return
        if arrives is None:  # the run was resumed with links that lose nothing
            self.lost = None
            return
        if self.lost is None:
            self.lost = Shared(Fragments([torch.empty_like(t) for t in sent.tensors]))
        for wanted, out in zip(sent.tensors, self.lost.write(), strict=True):
            torch.sub(wanted, arrives(wanted), out=out)

    def blend(self, model: Payload, *, merge_weight: float, carry: bool) -> None:
        assert isinstance(model, Fragments) and self.base is not None and self.at_cut is not None
        self._settle()
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
        self.sent, self.lost = None, None
        for held in (self.theta, self.base):
            for source, out in zip(model.tensors, held.write() if held else [], strict=False):
                out.copy_(source)
        for out in (*self.momentum.write(), *self.buffer.write()):
            out.zero_()

    def publish(self) -> Fragments:
        return self.theta.read()

    def answer(self, child: str, holds: int | None) -> tuple[Fragments, int | None]:
        model = self.publish()
        if self.links.difference is None:
            return model, None
        shadow = self.shadows.get(child)
        if shadow is None or shadow.number != holds:
            self.shadows[child] = Shadow(model)
            return model, None
        differs = zip(model.tensors, shadow.content, strict=True)
        difference = Fragments([now - known for now, known in differs])
        shadow.advance(map(self.links.difference, difference.tensors))
        return difference, holds

    def holds(self) -> int | None:
        return self.shadow.number if self.shadow is not None else None

    def whole(self, model: Payload, against: int | None) -> Fragments | None:
        assert isinstance(model, Fragments)
        if against is None:
            self.shadow = Shadow(model) if self.links.difference is not None else None
            return model
        if against != self.holds() or self.shadow is None:
            return None
        return self.shadow.advance(model.tensors)

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
        if self.sent is not None:
            parts["sent"] = self.sent
        if self.lost is not None:
            parts["lost"] = self.lost.read()
        if self.shadow is not None:
            parts[SHADOW] = self.shadow.content.read()
        shadows = self.shadows.items()
        return parts | {f"{SHADOW} {child}": s.content.read() for child, s in shadows}

    @classmethod
    def restore(
        cls,
        parts: dict[str, Fragments],
        settings: OuterSettings,
        links: Roundings = EXACT,
        *,
        step: int,
    ) -> TorchState:
        """From what :meth:`capture` gave."""
        base, lost, shadow = parts.get("base"), parts.get("lost"), parts.get(SHADOW)
        of_children = [name for name in parts if name.startswith(f"{SHADOW} ")]
        return cls(
            theta=Shared(parts["theta"]),
            momentum=Shared(parts["momentum"]),
            buffer=Shared(parts["buffer"]),
            settings=settings,
            base=Shared(base) if base else None,
            step=step,
            at_cut=parts.get("at_cut"),
            links=links,
            sent=parts.get("sent"),
            lost=Shared(lost) if lost else None,
            shadow=Shadow(shadow) if shadow else None,
            shadows={name.partition(" ")[2]: Shadow(parts[name]) for name in of_children},
        )
