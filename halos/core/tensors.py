"""The small interface behind which a server keeps its tensors.

The core orders work on tensors without seeing them: production hands a server
:class:`halos.core.state.TorchState`, a timing-only simulation hands it
:class:`NullState`. What travels in messages is a :class:`Payload`.
"""

from __future__ import annotations

from typing import Literal, Protocol

FRAGMENT_ELEMENTS = 16 * 2**20 // 4  # of which a model's fragments have at most: 16 MiB in fp32

RefusalReason = Literal[
    "non_finite",
    "wrong_shape",
    "unknown_sender",
    "fenced",
    "unknown_lease",
    "out_of_sequence",
    "not_granted",
    "other_run",
    "other_model",
    "other_dataset",
    "wrong_role",
]
"""Why a peer's message was refused; also the label under which refusals are counted."""


class Payload(Protocol):
    """Tensors in a message: a whole model or a whole update. Immutable once sent."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        ...

    def copy(self) -> Payload:
        """An equal payload that shares no memory with this one."""
        ...


class TensorState(Protocol):
    """What a server holds per model: parameters, outer optimizer and, with a parent, the base."""

    def check(self, payload: Payload) -> RefusalReason | None:
        """Why ``payload`` may not be applied, or ``None``. Never raises, never changes state."""
        ...

    def apply(self, pseudo_gradient: Payload) -> None:
        """One outer-optimizer step with a checked pseudo-gradient."""
        ...

    def cut(self) -> Payload:
        """``base - theta``: all that changed since the last merge. Remembers theta at the cut.

        With error feedback, together with what earlier pushes lost on their way.
        """
        ...

    def blend(self, model: Payload, *, merge_weight: float, carry: bool) -> None:
        """Merge the parent's model in and set the new base (see ``equations.merge``).

        It answers the push that was cut last: what that lost is kept for the next one.
        """
        ...

    def adopt(self, model: Payload) -> None:
        """Start again from ``model``: parameters and base become it, outer optimizer is reset."""
        ...

    def publish(self) -> Payload:
        """The current parameters; later calls of ``apply`` do not change what was published."""
        ...

    def answer(self, child: str, holds: int | None) -> tuple[Payload, int | None]:
        """The current parameters for a child server that holds the model ``holds``.

        Whole, or where links round what they carry as the difference to a model that both ends
        have: then with the number of that one.
        """
        ...

    def holds(self) -> int | None:
        """The number of the parent's model that a difference would be added to, if one is kept."""
        ...

    def whole(self, model: Payload, against: int | None) -> Payload | None:
        """What the parent answered, as a model; ``None`` if it differs from one not held here."""
        ...


class NullPayload:
    """A payload without tensors, for timing-only simulation."""

    nbytes = 0

    def copy(self) -> NullPayload:
        return self


NOTHING = NullPayload()


class NullState:
    """A tensor state without tensors: every operation is free and every payload is welcome."""

    def check(self, payload: Payload) -> RefusalReason | None:
        return None

    def apply(self, pseudo_gradient: Payload) -> None:
        pass

    def cut(self) -> Payload:
        return NOTHING

    def blend(self, model: Payload, *, merge_weight: float, carry: bool) -> None:
        pass

    def adopt(self, model: Payload) -> None:
        pass

    def publish(self) -> Payload:
        return NOTHING

    def answer(self, child: str, holds: int | None) -> tuple[Payload, int | None]:
        return NOTHING, None

    def holds(self) -> int | None:
        return None

    def whole(self, model: Payload, against: int | None) -> Payload | None:
        return model
