from halos.wire.v1 import messages_pb2 as _messages_pb2
from halos.wire.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Channel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANNEL_NODE: _ClassVar[Channel]
    CHANNEL_SESSION: _ClassVar[Channel]
CHANNEL_NODE: Channel
CHANNEL_SESSION: Channel

class HelloRequest(_message.Message):
    __slots__ = ("oldest_protocol", "newest_protocol", "features", "role", "name", "instance", "run")
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    oldest_protocol: int
    newest_protocol: int
    features: _containers.RepeatedScalarFieldContainer[str]
    role: _messages_pb2.Role
    name: str
    instance: bytes
    run: str
    def __init__(self, oldest_protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., role: _Optional[_Union[_messages_pb2.Role, str]] = ..., name: _Optional[str] = ..., instance: _Optional[bytes] = ..., run: _Optional[str] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("identity", "samples")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    identity: str
    samples: int
    def __init__(self, identity: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "features", "run", "specification_version", "specification", "layout", "datasets", "server", "name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SPECIFICATION_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPECIFICATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    features: _containers.RepeatedScalarFieldContainer[str]
    run: str
    specification_version: int
    specification: str
    layout: _transfer_pb2.Layout
    datasets: _containers.RepeatedCompositeFieldContainer[Dataset]
    server: str
    name: str
    def __init__(self, protocol: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., run: _Optional[str] = ..., specification_version: _Optional[int] = ..., specification: _Optional[str] = ..., layout: _Optional[_Union[_transfer_pb2.Layout, _Mapping]] = ..., datasets: _Optional[_Iterable[_Union[Dataset, _Mapping]]] = ..., server: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ChildFrame(_message.Message):
    __slots__ = ("channel", "message", "fetched", "telemetry", "hold")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    channel: Channel
    message: _messages_pb2.Message
    fetched: bytes
    telemetry: str
    hold: Hold
    def __init__(self, channel: _Optional[_Union[Channel, str]] = ..., message: _Optional[_Union[_messages_pb2.Message, _Mapping]] = ..., fetched: _Optional[bytes] = ..., telemetry: _Optional[str] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("name", "instance")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance: bytes
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[bytes] = ...) -> None: ...

class ParentFrame(_message.Message):
    __slots__ = ("channel", "message", "offer")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    channel: Channel
    message: _messages_pb2.Message
    offer: _transfer_pb2.Offer
    def __init__(self, channel: _Optional[_Union[Channel, str]] = ..., message: _Optional[_Union[_messages_pb2.Message, _Mapping]] = ..., offer: _Optional[_Union[_transfer_pb2.Offer, _Mapping]] = ...) -> None: ...

class ConstantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: str
    def __init__(self, status: _Optional[str] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("after", "wait")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    after: int
    wait: bool
    def __init__(self, after: _Optional[int] = ..., wait: bool = ...) -> None: ...

class ObserveReply(_message.Message):
    __slots__ = ("version", "local_steps", "tokens", "elapsed_s", "finished", "transfer", "manifest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    local_steps: int
    tokens: int
    elapsed_s: float
    finished: bool
    transfer: bytes
    manifest: _transfer_pb2.Manifest
    def __init__(self, version: _Optional[int] = ..., local_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., finished: bool = ..., transfer: _Optional[bytes] = ..., manifest: _Optional[_Union[_transfer_pb2.Manifest, _Mapping]] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("version", "local_steps", "tokens", "elapsed_s", "loss", "samples")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    version: int
    local_steps: int
    tokens: int
    elapsed_s: float
    loss: float
    samples: int
    def __init__(self, version: _Optional[int] = ..., local_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., loss: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class EvaluationReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
