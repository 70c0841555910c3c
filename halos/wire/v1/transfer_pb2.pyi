from halos.wire.v1 import messages_pb2 as _messages_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_FP32: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_FP16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
    CODEC_INT2: _ClassVar[Codec]
    CODEC_TOPK: _ClassVar[Codec]
    CODEC_INT8_ZSTD: _ClassVar[Codec]
    CODEC_INT4_ZSTD: _ClassVar[Codec]
    CODEC_INT2_ZSTD: _ClassVar[Codec]
    CODEC_TOPK_ZSTD: _ClassVar[Codec]
CODEC_UNSPECIFIED: Codec
CODEC_FP32: Codec
CODEC_BF16: Codec
CODEC_FP16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec
CODEC_INT2: Codec
CODEC_TOPK: Codec
CODEC_INT8_ZSTD: Codec
CODEC_INT4_ZSTD: Codec
CODEC_INT2_ZSTD: Codec
CODEC_TOPK_ZSTD: Codec

class Parameter(_message.Message):
    __slots__ = ("names", "shape", "dtype")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("parameters", "constants", "hash")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    constants: _containers.RepeatedCompositeFieldContainer[Parameter]
    hash: str
    def __init__(self, parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., constants: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., hash: _Optional[str] = ...) -> None: ...

class FragmentHeader(_message.Message):
    __slots__ = ("elements", "codec")
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    elements: int
    codec: Codec
    def __init__(self, elements: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("content", "fragments")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentHeader]
    def __init__(self, content: _Optional[bytes] = ..., fragments: _Optional[_Iterable[_Union[FragmentHeader, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("fragment", "elements")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    elements: int
    def __init__(self, fragment: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("fragment", "offset", "count", "crc32", "data")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    offset: int
    count: int
    crc32: int
    data: bytes
    def __init__(self, fragment: _Optional[int] = ..., offset: _Optional[int] = ..., count: _Optional[int] = ..., crc32: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("address", "first_fragment", "fragments")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    first_fragment: int
    fragments: int
    def __init__(self, address: _Optional[str] = ..., first_fragment: _Optional[int] = ..., fragments: _Optional[int] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("run", "protocol", "specification_version", "sender")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SPECIFICATION_VERSION_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    run: str
    protocol: int
    specification_version: int
    sender: str
    def __init__(self, run: _Optional[str] = ..., protocol: _Optional[int] = ..., specification_version: _Optional[int] = ..., sender: _Optional[str] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("header", "message", "manifest", "parts")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    message: _messages_pb2.Message
    manifest: Manifest
    parts: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., message: _Optional[_Union[_messages_pb2.Message, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., parts: _Optional[int] = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ("transfer", "received", "endpoints")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    transfer: bytes
    received: _containers.RepeatedCompositeFieldContainer[Progress]
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, transfer: _Optional[bytes] = ..., received: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class UploadFrame(_message.Message):
    __slots__ = ("part", "chunk", "begin")
    PART_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    part: Part
    chunk: Chunk
    begin: BeginRequest
    def __init__(self, part: _Optional[_Union[Part, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., begin: _Optional[_Union[BeginRequest, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("transfer", "part")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    transfer: bytes
    part: int
    def __init__(self, transfer: _Optional[bytes] = ..., part: _Optional[int] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("elements",)
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    elements: int
    def __init__(self, elements: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: bytes
    def __init__(self, transfer: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Offer(_message.Message):
    __slots__ = ("message", "transfer", "manifest", "endpoints")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    message: _messages_pb2.Message
    transfer: bytes
    manifest: Manifest
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, message: _Optional[_Union[_messages_pb2.Message, _Mapping]] = ..., transfer: _Optional[bytes] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("transfer", "received")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    transfer: bytes
    received: _containers.RepeatedCompositeFieldContainer[Progress]
    def __init__(self, transfer: _Optional[bytes] = ..., received: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
