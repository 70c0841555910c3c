"""How plain data and protobuf correspond: one description a type, for both directions.

A description has ``fill``, which writes a value into a protobuf message, and ``read``, which makes
the value again or raises :class:`MalformedMessage`. It knows no particular message: those are in
:mod:`halos.wire.serde`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

ID_BYTES = 16
LARGEST = 2**63 - 1  # of any number; what is above it cannot have been counted

T = TypeVar("T")


class MalformedMessage(ValueError):  # noqa: N818  the peer's fault
    """Bytes from a peer that are no message of this protocol; the text is a sentence."""


def of(proto: Proto, field: str) -> str:
    """Where something is wrong, as the beginning of a sentence."""
    return f"{proto.DESCRIPTOR.name}.{field}"


# ---------------------------------------------------------------- fields


class Field(Protocol):
    """One field of a protobuf message, under its name."""

    def put(self, proto: Proto, name: str, value: Any) -> None: ...

    def get(self, proto: Proto, name: str) -> Any: ...


class Plain:
    """A number, text, bytes or truth: protobuf checks its type, and that text is UTF-8."""

    def put(self, proto: Proto, name: str, value: Any) -> None:
        setattr(proto, name, value)

    def get(self, proto: Proto, name: str) -> Any:
        return _counted(getattr(proto, name), proto, name)


class Identity(Plain):
    """Sixteen random bytes."""

    def get(self, proto: Proto, name: str) -> bytes:
        value: bytes = getattr(proto, name)
        if len(value) != ID_BYTES:
            raise MalformedMessage(f"{of(proto, name)} has {len(value)} bytes, not {ID_BYTES}")
        return value


@dataclass(frozen=True)
class Word(Plain):
    """A text out of a set."""

    known: Collection[str]

    def get(self, proto: Proto, name: str) -> str:
        value: str = getattr(proto, name)
        if value not in self.known:
            raise MalformedMessage(f"{of(proto, name)}: {value!r} is not known in this version")
        return value


class Choice:
    """An enumeration of the protocol; ``numbers`` has the values of ours."""

    def __init__(self, numbers: Mapping[Any, int]) -> None:
        self.numbers = numbers
        self.values = {number: value for value, number in numbers.items()}

    def put(self, proto: Proto, name: str, value: Any) -> None:
        setattr(proto, name, self.numbers[value])

    def get(self, proto: Proto, name: str) -> Any:
        number = getattr(proto, name)
        if number not in self.values:
            raise MalformedMessage(f"{of(proto, name)}: {number} is not known in this version")
        return self.values[number]


class Many:
    """Any number of numbers or texts, as a tuple."""

    def put(self, proto: Proto, name: str, value: Any) -> None:
        getattr(proto, name).extend(value)

    def get(self, proto: Proto, name: str) -> Any:
        return tuple([_counted(value, proto, name) for value in getattr(proto, name)])


@dataclass(frozen=True)
class Maybe:
    """``None`` stands for a field that is not there."""

    inner: Field

    def put(self, proto: Proto, name: str, value: Any) -> None:
        if value is not None:
            self.inner.put(proto, name, value)

    def get(self, proto: Proto, name: str) -> Any:
        return self.inner.get(proto, name) if proto.HasField(name) else None


@dataclass(frozen=True)
class One:
    """A message within a message, which has to be there."""

    inner: Shape[Any]

    def put(self, proto: Proto, name: str, value: Any) -> None:
        inside = getattr(proto, name)
        inside.SetInParent()  # also when all of it is as by default
        self.inner.fill(inside, value)

    def get(self, proto: Proto, name: str) -> Any:
        if not proto.HasField(name):
            raise MalformedMessage(f"{of(proto, name)} is missing")
        return self.inner.read(getattr(proto, name))


@dataclass(frozen=True)
class Each:
    """Any number of messages within a message, as a tuple."""

    inner: Shape[Any]

    def put(self, proto: Proto, name: str, value: Any) -> None:
        for item in value:
            self.inner.fill(getattr(proto, name).add(), item)

    def get(self, proto: Proto, name: str) -> Any:
        return tuple([self.inner.read(item) for item in getattr(proto, name)])


@dataclass(frozen=True)
class Wrapped:
    """A field that is the only one of our dataclass ``kind``."""

    kind: type
    inner: Field

    def put(self, proto: Proto, name: str, value: Any) -> None:
        (only,) = dataclasses.fields(self.kind)
        self.inner.put(proto, name, getattr(value, only.name))

    def get(self, proto: Proto, name: str) -> Any:
        return self.kind(self.inner.get(proto, name))


@dataclass(frozen=True)
class Apart:
    """A field that does not travel here; ``value`` stands for it at both ends."""

    value: Any

    def put(self, proto: Proto, name: str, value: Any) -> None:
        assert value is self.value, f"{of(proto, name)} does not travel in a message"

    def get(self, proto: Proto, name: str) -> Any:
        return self.value


def _counted(value: Any, proto: Proto, name: str) -> Any:
    if isinstance(value, int) and value > LARGEST:
        raise MalformedMessage(f"{of(proto, name)}: {value} is too large for anything counted")
    return value


PLAIN, ID, MANY = Plain(), Identity(), Many()

# ---------------------------------------------------------------- messages


class Shape(Protocol[T]):
    """What a protobuf message corresponds to."""

    def fill(self, proto: Any, value: T) -> None: ...

    def read(self, proto: Any) -> T: ...


@dataclass(frozen=True)
class Record(Generic[T]):
    """A dataclass, whose fields are the message's under the same names."""

    kind: type[T]
    fields: Mapping[str, Field]

    def fill(self, proto: Proto, value: T) -> None:
        for name, field in self.fields.items():
            field.put(proto, name, getattr(value, name))

    def read(self, proto: Proto) -> T:
        return self.kind(**{name: field.get(proto, name) for name, field in self.fields.items()})


def record(proto: type[Proto], kind: type[T], **special: Field) -> Record[T]:
    """Describe ``kind``; its fields are plain but for the ``special`` ones."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    fields = {name: special.get(name, PLAIN) for name in names}
    travels = {name for name, field in fields.items() if not isinstance(field, Apart)}
    assert travels == set(proto.DESCRIPTOR.fields_by_name), f"{kind} is not {proto}"
    assert special.keys() <= fields.keys(), f"{kind} has not all of {special.keys()}"
    return Record(kind, fields)


class Union(Generic[T]):
    """One of several kinds of value, each under its name in the oneof ``kind``."""

    def __init__(self, what: str, members: Mapping[str, tuple[type, Field]]) -> None:
        self.what = what
        self.fields = {name: field for name, (_, field) in members.items()}
        self.names = {kind: name for name, (kind, _) in members.items()}

    @classmethod
    def of(cls, what: str, records: Mapping[str, Record[Any]]) -> Union[T]:
        """Of messages within the message."""
        return cls(what, {name: (record.kind, One(record)) for name, record in records.items()})

    def fill(self, proto: Proto, value: T) -> None:
        name = self.names[type(value)]
        self.fields[name].put(proto, name, value)

    def read(self, proto: Proto) -> T:
        name = proto.WhichOneof("kind")
        if name is None:
            raise MalformedMessage(f"{self.what} is of a kind that this version does not know")
        if name not in self.fields:
            raise MalformedMessage(f"{name} is not {self.what}")
        value: T = self.fields[name].get(proto, name)
        return value


# ---------------------------------------------------------------- bytes


@dataclass(frozen=True)
class Form(Generic[T]):
    """A whole message as bytes, and back."""

    proto: type[Proto]
    shape: Shape[T]

    def encode(self, value: T) -> bytes:
        proto = self.proto()
        self.shape.fill(proto, value)
        return proto.SerializeToString()

    def decode(self, data: bytes) -> T:
        """Raises :class:`MalformedMessage`."""
        try:
            proto = self.proto.FromString(data)
        except DecodeError as error:
            raise MalformedMessage(
                f"{len(data)} bytes are no {self.proto.DESCRIPTOR.name}"
            ) from error
        return self.shape.read(proto)


@dataclass(frozen=True)
class Only:
    """The value of a message's single field, for a message that is nothing more."""

    name: str
    field: Field = PLAIN

    def fill(self, proto: Proto, value: Any) -> None:
        self.field.put(proto, self.name, value)

    def read(self, proto: Proto) -> Any:
        return self.field.get(proto, self.name)


class Empty:
    """``None``, for a message without fields."""

    def fill(self, proto: Proto, value: None) -> None:
        pass

    def read(self, proto: Proto) -> None:
        return None


Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]
