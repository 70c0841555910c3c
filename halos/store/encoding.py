"""State and messages as JSON, tensors beside it; no pickle, and only types that are named here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from cattrs import Converter
from cattrs.strategies import configure_tagged_union
from isal import isal_zlib
from torch import Tensor

from halos.core.fragments import Fragments
from halos.core.messages import Effect, Event, Message, Notice
from halos.core.tensors import NOTHING, NullPayload, Payload


class TensorTable:
    """Tensors by key, each once however often it is referred to.

    Holds the payloads that they came from, so that their owners write elsewhere meanwhile.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.payloads: list[Payload] = []
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
        self.payloads.append(payload)
        return [self.add(t) for t in payload.tensors]


class PayloadReader:
    """The inverse of :class:`TensorTable`: equal keys give one and the same payload.

    It matters that it is one, since holding it keeps its owner from writing to it. All are held
    here: let go of this once everything is read.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[str, ...], Fragments] = {}

    def payload(self, keys: list[str] | None) -> Payload:
        return NOTHING if keys is None else self.fragments(keys)

    def fragments(self, keys: list[str]) -> Fragments:
        """Raises ``KeyError`` for a tensor that is not there."""
        known = self._known.get(tuple(keys))
        if known is None:
            known = Fragments([self._tensors[key] for key in keys])
            self._known[tuple(keys)] = known
        return known


def encoder(table: TensorTable) -> Converter:
    """Turns state into JSON values, putting the tensors of payloads into ``table``."""
    return _converter(write=table.add_payload)


def decoder(payloads: PayloadReader) -> Converter:
    """Turns JSON values back into state. Raises for anything that does not fit its type."""
    return _converter(read=lambda keys, _: payloads.payload(keys))


def describer() -> Converter:
    """Turns events and effects into JSON values for people.

    Of tensors only how many bytes they are and the CRC-32 of these, taken once for each payload.
    Any number of threads may use it at once.
    """
    known: WeakKeyDictionary[Fragments, int] = WeakKeyDictionary()

    def describe(payload: Payload) -> dict[str, int]:
        if not isinstance(payload, Fragments):
            return {"bytes": payload.nbytes}
        checksum = known.get(payload)
        if checksum is None:
            checksum = known[payload] = _checksum(payload)
        return {"bytes": payload.nbytes, "crc32": checksum}

    return _converter(write=describe)


def _checksum(payload: Fragments) -> int:
    checksum = 0
    for tensor in payload.tensors:
        as_bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        checksum = isal_zlib.crc32(as_bytes.numpy().data, checksum)
    return checksum


def _one_way(*_: Any) -> Any:
    raise TypeError("this converter works in one direction only")


def _converter(
    write: Callable[[Payload], Any] = _one_way, read: Callable[[Any, Any], Payload] = _one_way
) -> Converter:
    converter = Converter(unstruct_collection_overrides={tuple: list}, forbid_extra_keys=True)
    converter.register_unstructure_hook_func(_is_payload, write)
    converter.register_structure_hook_func(_is_payload, read)
    for union in (Message, Notice, Event, Effect):
        configure_tagged_union(union, converter, tag_name="type")
    return converter


def _is_payload(kind: Any) -> bool:
    return kind is Payload
