"""What of a model is equal on all machines and never trained: carried once, when one joins."""

from __future__ import annotations

import logging

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from halos.errors import UserError
from halos.training.parameters import named_constants, type_name

log = logging.getLogger(__name__)


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and persistent buffers by name, tied ones under their first name only.

    The tensors themselves, not copies.
    """
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named_constants(module):
        first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


def constants_blob(module: nn.Module) -> bytes:
    """The module's constants in the format of safetensors.

    Raises ``UserError`` for a type that this format does not know.
    """
    found = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in constants_of(module).items()
    }
    try:
        return save(found)
    except (KeyError, ValueError, SafetensorError):
        bad = next((n for n, t in found.items() if not _can_be_saved(t)), "")
        raise UserError(
            f"constant {bad} is of type {type_name(found[bad])}, which cannot be sent; make it a "
            "buffer with persistent=False"
        ) from None


@torch.no_grad()
def load_constants(module: nn.Module, blob: bytes) -> None:
    """Take over what :func:`constants_blob` gave of the same model, all or nothing.

    Raises ``UserError`` that names the first constant of another name, shape or type.
    """
    try:
        given = load(blob)
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"the run's constants are damaged: {error}") from None
    mine = constants_of(module)
    for name in [*mine, *given]:
        if name not in given:
            raise UserError(f"constant {name} is not one of the run's model, but of this one")
        if name not in mine:
            raise UserError(f"constant {name} is one of the run's model, but not of this one")
        here, there = mine[name], given[name]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise UserError(
                f"constant {name} is of shape {tuple(here.shape)} and type {type_name(here)}, but "
                f"in the run of {tuple(there.shape)} and {type_name(there)}"
            )
    for name, tensor in mine.items():
        tensor.copy_(given[name])


def warn_of_running_averages(module: nn.Module) -> None:
    """Say that a batch norm's averages are no constants, although they are treated so."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    for name, part in module.named_modules():
        if isinstance(part, kinds) and part.track_running_stats:
            log.warning(
                "model: the running averages of %s stay each worker's own and are not exchanged; "
                "use a norm without them, or set its track_running_stats to False",
                name or type(part).__name__,
            )


def _can_be_saved(tensor: Tensor) -> bool:
    try:
        save({"": tensor})
    except (KeyError, ValueError, SafetensorError):
        return False
    return True
