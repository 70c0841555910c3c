"""State and messages as JSON, tensors beside it: no pickle, nothing built but what is named here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cattrs import Converter
from cattrs.strategies import configure_tagged_union
from torch import Tensor

from halos.core.fragments import Fragments
from halos.core.messages import Effect, Event, Message, Notice
from halos.core.tensors import NOTHING, NullPayload, Payload


class TensorTable:
    """Tensors by key, each once however often it is referred to."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}

    def add(self, tensor: Tensor) -> str:
        key = self._keys.get(id(tensor))
        if key is None:
            key = self._keys[id(tensor)] = str(len(self.tensors))
            self.tensors[key] = tensor
        return key

    def add_payload(self, payload: Payload) -> list[str] | None:
        if isinstance(payload, NullPayload):
            return None
        assert isinstance(payload, Fragments)
        return [self.add(t) for t in payload.tensors]


def payload_from(keys: list[str] | None, tensors: Mapping[str, Tensor]) -> Payload:
    """The inverse of :meth:`TensorTable.add_payload`. Raises ``KeyError`` for a missing tensor."""
    return NOTHING if keys is None else Fragments([tensors[key] for key in keys])


def encoder(table: TensorTable) -> Converter:
    """Turns state into JSON values, putting the tensors of payloads into ``table``."""
    converter = _converter()
    converter.register_unstructure_hook_func(_is_payload, table.add_payload)
    return _with_unions(converter)


def decoder(tensors: Mapping[str, Tensor]) -> Converter:
    """Turns JSON values back into state. Raises for anything that does not fit its type."""
    converter = _converter()
    converter.register_structure_hook_func(_is_payload, lambda keys, _: payload_from(keys, tensors))
    return _with_unions(converter)


def describer() -> Converter:
    """Turns events and effects into JSON values for people: of tensors only their bytes."""
    converter = _converter()
    converter.register_unstructure_hook_func(_is_payload, lambda p: {"bytes": p.nbytes})
    return _with_unions(converter)


def _converter() -> Converter:
    return Converter(unstruct_collection_overrides={tuple: list}, forbid_extra_keys=True)


def _with_unions(converter: Converter) -> Converter:
    for union in (Message, Notice, Event, Effect):
        configure_tagged_union(union, converter, tag_name="type")
    return converter


def _is_payload(kind: Any) -> bool:
    return kind is Payload
