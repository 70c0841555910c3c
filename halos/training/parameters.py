"""Between a torch module and the flat fragments that travel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halos.core.fragments import Fragments, ModelLayout, Parameter
from halos.errors import UserError


def layout_of(module: nn.Module) -> ModelLayout:
    """The module's parameters in its own order, each tied one once under all its names.

    Tied means: the same ``nn.Parameter``. What is not trained (``requires_grad`` is false) and
    buffers that a state dict holds are constants. Raises ``UserError`` for a trainable parameter
    that does not hold real floating-point numbers.
    """
    trained = [(n, p) for n, p in _parameters(module) if p.requires_grad]
    for name, parameter in trained:
        if not parameter.is_floating_point():
            raise UserError(
                f"parameter {name} is of type {type_name(parameter)}: only parameters of real "
                "floating-point types can be trained together; set its requires_grad to False"
            )
    return ModelLayout(_logical(trained), _logical(named_constants(module)))


def named_constants(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Frozen parameters, then persistent buffers, in the module's order; tied ones repeatedly."""
    frozen: list[tuple[str, Tensor]] = [
        (name, parameter) for name, parameter in _parameters(module) if not parameter.requires_grad
    ]
    buffers = [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
        if name not in part._non_persistent_buffers_set
    ]
    return frozen + buffers


def parameters_of(module: nn.Module, layout: ModelLayout) -> list[nn.Parameter]:
    """The module's parameters in the layout's order.

    Raises ``ValueError`` naming the first that the module lacks or has in another shape.
    """
    mine = dict(module.named_parameters(remove_duplicate=False))
    found = []
    for wanted in layout.parameters:
        parameter = mine.get(wanted.names[0])
        if parameter is None:
            raise ValueError(f"the module has no parameter {wanted.names[0]}")
        if tuple(parameter.shape) != wanted.shape:
            raise ValueError(
                f"parameter {wanted.names[0]} has shape {tuple(parameter.shape)}, "
                f"not {wanted.shape}"
            )
        found.append(parameter)
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the flat model that lies in one parameter and in one fragment."""

    fragment: int
    in_fragment: slice
    in_parameter: slice


def pieces(layout: ModelLayout) -> Iterator[tuple[int, list[Piece]]]:
    """For each parameter that is not empty, by its number, its pieces in order."""
    fragments = layout.fragments
    current = 0
    for number, (offset, parameter) in enumerate(
        zip(layout.offsets, layout.parameters, strict=True)
    ):
        at, end, found = offset, offset + parameter.numel, []
        while at < end:
            start, stop = fragments[current]
            until = min(end, stop)
            found.append(
                Piece(current, slice(at - start, until - start), slice(at - offset, until - offset))
            )
            at = until
            current += at == stop
        if found:
            yield number, found


def gather(module: nn.Module, layout: ModelLayout) -> Fragments:
    """The module's parameters as new flat fp32 fragments on the CPU."""
    parameters, flat = parameters_of(module, layout), _empty(layout)
    for number, parts in pieces(layout):
        source = parameters[number].detach().reshape(-1)
        for part in parts:
            flat[part.fragment][part.in_fragment].copy_(source[part.in_parameter])
    return Fragments(flat)


@torch.no_grad()
def scatter(module: nn.Module, layout: ModelLayout, fragments: Fragments) -> None:
    """Copy ``fragments`` into the module's parameters, in place, rounding to their types.

    Raises ``ValueError`` if the fragments are not of this layout.
    """
    _check(layout, fragments)
    parameters = parameters_of(module, layout)
    for number, parts in pieces(layout):
        parameter = parameters[number].detach()
        contiguous = parameter.is_contiguous()
        flat = parameter.view(-1) if contiguous else parameter.new_empty(parameter.numel())
        for part in parts:
            flat[part.in_parameter].copy_(fragments.tensors[part.fragment][part.in_fragment])
        if not contiguous:
            parameter.copy_(flat.view(parameter.shape))


@torch.no_grad()
def difference(start: Fragments, module: nn.Module, layout: ModelLayout) -> Fragments:
    """``start`` minus the module's parameters: the pseudo-gradient of training since ``start``.

    New fp32 fragments on the CPU; beyond them no memory of the model's size is taken.
    Raises ``ValueError`` if the fragments are not of this layout.
    """
    _check(layout, start)
    parameters, flat = parameters_of(module, layout), _empty(layout)
    for number, parts in pieces(layout):
        end = parameters[number].detach().reshape(-1)
        for part in parts:
            out = flat[part.fragment][part.in_fragment]
            begin = start.tensors[part.fragment][part.in_fragment]
            if end.device == out.device and end.dtype == out.dtype:
                torch.sub(begin, end[part.in_parameter], out=out)
            else:
                out.copy_(end[part.in_parameter])
                torch.sub(begin, out, out=out)
    return Fragments(flat)


def l2_norm(fragments: Fragments) -> float:
    """Norm of all fragments taken as one vector."""
    return math.hypot(*(float(torch.linalg.vector_norm(t)) for t in fragments.tensors))


def to_state_dict(layout: ModelLayout, fragments: Fragments) -> dict[str, Tensor]:
    """Parameters by name, in their own shapes and types; a tied one under its first name only.

    For reading only: a tensor shares the fragment's memory where it lies in one of its own type.
    """
    _check(layout, fragments)
    state = {p.names[0]: torch.empty(p.shape) for p in layout.parameters if not p.numel}
    for number, parts in pieces(layout):
        found = [fragments.tensors[part.fragment][part.in_fragment] for part in parts]
        flat = found[0] if len(found) == 1 else torch.cat(found)
        state[layout.parameters[number].names[0]] = flat.view(layout.parameters[number].shape)
    return {p.names[0]: state[p.names[0]].to(getattr(torch, p.dtype)) for p in layout.parameters}


def _empty(layout: ModelLayout) -> list[Tensor]:
    return [torch.empty(end - start, dtype=torch.float32) for start, end in layout.fragments]


def _check(layout: ModelLayout, fragments: Fragments) -> None:
    wanted = [(end - start,) for start, end in layout.fragments]
    if [tuple(t.shape) for t in fragments.tensors] != wanted:
        raise ValueError("these fragments belong to a model of another layout")


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _logical(named: Sequence[tuple[str, Tensor]]) -> tuple[Parameter, ...]:
    names: dict[int, list[str]] = {}
    first: dict[int, Tensor] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), tensor)
        names.setdefault(id(tensor), []).append(name)
    return tuple(
        Parameter(tuple(names[key]), tuple(tensor.shape), type_name(tensor))
        for key, tensor in first.items()
    )


def type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
