"""A ``torch.optim`` optimizer of the user's own, with all that it remembers as named tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halos.errors import UserError

SHAPE = "structure"  # JSON, as bytes: numbers, and where which tensor belongs
LR_SCALE = "lr_scale"
Packed = dict[str, Any]


class BorrowedOptimizer:
    """Steps an optimizer at the run's rate, times the ``lr_scale`` of a parameter group that has
    one.

    State that the optimizer makes at its first step, and what it keeps in its groups, is returned
    to as well: a round that is given up never was.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Raises ``UserError`` unless the optimizer holds the model's trainable parameters."""
        self.optimizer = optimizer
        self._names = names_of(optimizer, model)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, learning_rate: float) -> object:
        for group in self.optimizer.param_groups:
            rate = learning_rate * group.get(LR_SCALE, 1.0)
            if isinstance(group["lr"], Tensor):  # its address may be part of a captured graph
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        made = self.optimizer.state
        structure = {
            "state": {
                name: pack(made[parameter], f"state.{name}", tensors)
                for parameter, name in self._names.items()
                if parameter in made
            },
            "groups": [
                pack({k: v for k, v in group.items() if k != "params"}, f"group.{i}", tensors)
                for i, group in enumerate(self.optimizer.param_groups)
            ],
        }
        text = bytearray(json.dumps(structure).encode())
        return {**tensors, SHAPE: torch.frombuffer(text, dtype=torch.uint8)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Tensors that are there keep their memory where they fit."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        if SHAPE not in state:
            raise ValueError("this training state belongs to another model or optimizer")
        structure = json.loads(bytes(state[SHAPE].tolist()))
        groups = self.optimizer.param_groups
        if len(structure["groups"]) != len(groups) or structure["state"].keys() - parameters:
            raise ValueError("this training state belongs to another model or optimizer")
        mine = self.state()
        for name in self._names.values():
            parameter = parameters[name]
            kept = structure["state"].get(name)
            if kept is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = unpack(kept, state, mine, parameter.device)
        for group, kept in zip(groups, structure["groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update({"params": params, **unpack(kept, state, mine, torch.device("cpu"))})


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, str]:
    """The model's name of each parameter that ``optimizer`` holds, in its order."""
    known = {parameter: name for name, parameter in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(parameter not in known for parameter in held):
        raise UserError(
            "optimizer: holds a parameter that is not one of the model's; make it of "
            "model.parameters(), of the very model that joins"
        )
    left = [n for p, n in known.items() if p.requires_grad and p not in set(held)]
    if left:
        raise UserError(
            f"optimizer: does not hold parameter {left[0]}, which is trainable; give it to the "
            "optimizer, or set its requires_grad to False"
        )
    return {parameter: known[parameter] for parameter in held}


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; its tensors go into ``tensors``, under ``name`` and what leads to them.

    Raises ``UserError`` for anything that is neither a tensor, a plain value, nor made of these.
    """
    match value:
        case Tensor():
            tensors[name] = value.detach() if value.requires_grad else value
            return {"tensor": name}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            items = [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        case Mapping():
            return {"dict": [[k, pack(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    raise UserError(
        f"optimizer: keeps {name} as {type(value).__name__}, which cannot be saved; use an "
        "optimizer whose state is made of tensors and numbers"
    )


def unpack(
    kept: Any, tensors: Mapping[str, Tensor], mine: Mapping[str, Tensor], device: torch.device
) -> Any:
    """What :func:`pack` packed; a tensor goes into that of ``mine`` where it fits, else is new."""
    if not isinstance(kept, dict):
        return kept
    ((kind, inner),) = kept.items()
    if kind == "tensor":
        saved, there = tensors[inner], mine.get(inner)
        if there is not None and (there.shape, there.dtype) == (saved.shape, saved.dtype):
            return there.copy_(saved)
        return saved.to(device, copy=True)
    if kind == "dict":
        return {key: unpack(value, tensors, mine, device) for key, value in inner}
    items = [unpack(item, tensors, mine, device) for item in inner]
    return tuple(items) if kind == "tuple" else items
