"""Between plain data and protobuf: the only module that imports what protoc generated.

:data:`METHODS` has, for each call of the services, the functions that gRPC takes. What a peer sent
is checked for its form here, and for nothing else: whatever does not fit is a
:class:`MalformedMessage`. Fields that are not known are passed over, so that neighbouring versions
understand each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from halos.core import messages as core
from halos.core.samples import Block, Lease, Range, Report
from halos.core.tensors import FRAGMENT_ELEMENTS, NOTHING, RefusalReason
from halos.wire import chunk_bytes, frames
from halos.wire.records import (
    ID,
    MANY,
    PLAIN,
    Apart,
    Choice,
    Decode,
    Each,
    Empty,
    Encode,
    Form,
    MalformedMessage,
    Maybe,
    One,
    Only,
    Record,
    Union,
    Word,
    Wrapped,
    record,
)
from halos.wire.v1 import messages_pb2 as pb
from halos.wire.v1 import service_pb2 as service
from halos.wire.v1 import transfer_pb2 as transfer

__all__ = [
    "METHODS",
    "SERVICE_NAMES",
    "MalformedMessage",
    "Method",
    "message_bytes",
    "message_from",
]

MAYBE = Maybe(PLAIN)

# ---------------------------------------------------------------- samples


class _Range:
    def fill(self, proto: pb.Range, value: Range) -> None:
        proto.start, proto.end = value

    def read(self, proto: pb.Range) -> Range:
        if not proto.start <= proto.end < 2**63:
            raise MalformedMessage(f"samples {proto.start} to {proto.end} are no range")
        return proto.start, proto.end


class _Block:
    """Its two ends are fields of ours, and a range in the protocol."""

    def fill(self, proto: pb.Block, value: Block) -> None:
        proto.dataset, proto.origin, proto.progress = value.dataset, value.origin, value.progress
        RANGE.put(proto, "range", (value.start, value.end))

    def read(self, proto: pb.Block) -> Block:
        origin, progress = (PLAIN.get(proto, name) for name in ("origin", "progress"))
        start, end = RANGE.get(proto, "range")
        return Block(proto.dataset, origin, start, end, progress)


RANGE, RANGES = One(_Range()), Each(_Range())
LEASE = record(pb.Lease, Lease, ranges=RANGES)
REPORT = record(pb.Report, Report, contained=RANGES, dropped=RANGES)

# ---------------------------------------------------------------- the core's messages

WORKER, SERVER, OBSERVER = pb.ROLE_WORKER, pb.ROLE_SERVER, pb.ROLE_OBSERVER
ROLE = Choice({"worker": WORKER, "server": SERVER})
PEER_ROLE = Choice({"worker": WORKER, "server": SERVER, "observer": OBSERVER})
REASON = Word(get_args(RefusalReason))
TENSORS = Apart(NOTHING)

UP: Mapping[str, Record[Any]] = {
    "join": record(pb.Join, core.Join, role=ROLE, datasets=MANY),
    "heartbeat": record(pb.Heartbeat, core.Heartbeat),
    "leave": record(pb.Leave, core.Leave),
    "ready": record(pb.Ready, core.Ready, lease=MAYBE),
    "resume": record(pb.Resume, core.Resume),
    "block_request": record(pb.BlockRequest, core.BlockRequest),
    "worker_update": record(pb.WorkerUpdate, core.WorkerUpdate, payload=TENSORS),
    "push": record(pb.Push, core.Push, report=One(REPORT), payload=TENSORS, holds=MAYBE),
}
DOWN: Mapping[str, Record[Any]] = {
    "welcome": record(pb.Welcome, core.Welcome),
    "heartbeat_seen": record(pb.HeartbeatSeen, core.HeartbeatSeen),
    "assignment": record(
        pb.Assignment, core.Assignment, answers=MAYBE, lease=One(LEASE), payload=TENSORS
    ),
    "receipt": record(pb.Receipt, core.Receipt),
    # With tensors it says another thing than without: see ``OFFERED``.
    "resumed": record(pb.Resumed, core.Resumed, payload=Apart(None)),
    "grant": record(pb.Grant, core.Grant, blocks=Each(_Block())),
    "drain": record(pb.Drain, core.Drain),
    "push_answer": record(pb.PushAnswer, core.PushAnswer, payload=TENSORS, against=MAYBE),
    "refused": record(pb.Refused, core.Refused, reason=REASON, fence=MAYBE),
    "stop": record(pb.Stop, core.Stop),
}
RESUMED = record(pb.Resumed, core.Resumed, payload=TENSORS)

FROM_CHILD: Union[core.Message] = Union.of("a message of a child", UP)
FROM_PARENT: Union[core.Message] = Union.of("a message of a parent", DOWN)
ANNOUNCED: Union[core.Message] = Union.of(
    "an update", {name: UP[name] for name in ("worker_update", "push")}
)
OFFERED: Union[core.Message] = Union.of(
    "a message that carries a model",
    {"resumed": RESUMED, **{name: DOWN[name] for name in ("assignment", "push_answer")}},
)
MESSAGE: Form[core.Message] = Form(pb.Message, Union.of("a message", {**UP, **DOWN}))


def message_bytes(message: core.Message) -> bytes:
    """Any of the core's messages, without its tensors: its payload is ``NOTHING``."""
    return MESSAGE.encode(message)


def message_from(data: bytes) -> core.Message:
    """The inverse of :func:`message_bytes`. Raises :class:`MalformedMessage`."""
    return MESSAGE.decode(data)


# ---------------------------------------------------------------- payloads

CODEC = Choice(
    {
        name: transfer.Codec.Value(f"CODEC_{name.upper().replace('+', '_')}")
        for name in get_args(frames.CodecName)
    }
)
HEADERS = Each(record(transfer.FragmentHeader, frames.FragmentHeader, codec=CODEC))
MANIFEST = record(transfer.Manifest, frames.Manifest, content=ID, fragments=HEADERS)
RECEIVED = Each(record(transfer.Progress, frames.Progress))
ENDPOINTS = Each(record(transfer.Endpoint, frames.Endpoint))
CHUNK = record(transfer.Chunk, frames.Chunk)
BEGIN = record(
    transfer.BeginRequest,
    frames.Begin,
    header=One(record(transfer.Header, frames.Header)),
    message=One(ANNOUNCED),
    manifest=One(MANIFEST),
)
PART = record(transfer.Part, frames.Part, transfer=ID)
UPLOAD_FRAME: Union[frames.UploadFrame] = Union.of(
    "an upload's frame", {"part": PART, "chunk": CHUNK, "begin": BEGIN}
)


def _sane(chunk: frames.Chunk) -> frames.Chunk:
    too_large = len(chunk.data) > frames.CHUNK_BYTES or chunk.count > FRAGMENT_ELEMENTS
    if too_large or chunk.offset >= 2**63:
        raise MalformedMessage(
            f"{chunk.count} elements from {chunk.offset} on in {len(chunk.data)} bytes are no chunk"
        )
    return chunk


class _ChunkForm(Form[frames.Chunk]):
    def encode(self, value: frames.Chunk) -> bytes:
        return chunk_bytes.encode_chunk(value)

    def decode(self, data: bytes) -> frames.Chunk:
        return _sane(chunk_bytes.decode_chunk(data) or super().decode(data))


class _UploadForm(Form[frames.UploadFrame]):
    def encode(self, value: frames.UploadFrame) -> bytes:
        if isinstance(value, frames.Chunk):
            return chunk_bytes.encode_upload(value)
        return super().encode(value)

    def decode(self, data: bytes) -> frames.UploadFrame:
        frame = chunk_bytes.decode_upload(data) or super().decode(data)
        return _sane(frame) if isinstance(frame, frames.Chunk) else frame


# ---------------------------------------------------------------- talk

CHANNEL = Choice({channel: channel.value for channel in frames.Channel})


@dataclass(frozen=True)
class _Said:
    """A message, and the channel that stands beside it in the frame."""

    messages: One

    def put(self, proto: Any, name: str, value: frames.Said) -> None:
        CHANNEL.put(proto, "channel", value.channel)
        self.messages.put(proto, name, value.message)

    def get(self, proto: Any, name: str) -> frames.Said:
        return frames.Said(CHANNEL.get(proto, "channel"), self.messages.get(proto, name))


HOLD = record(service.Hold, frames.Hold, instance=ID)
OFFER = record(
    transfer.Offer,
    frames.Offer,
    message=One(OFFERED),
    transfer=ID,
    manifest=One(MANIFEST),
    endpoints=ENDPOINTS,
)
CHILD_FRAME: Union[frames.ChildFrame] = Union(
    "a child's frame",
    {
        "message": (frames.Said, _Said(One(FROM_CHILD))),
        "fetched": (frames.Fetched, Wrapped(frames.Fetched, ID)),
        "telemetry": (frames.Telemetry, Wrapped(frames.Telemetry, PLAIN)),
        "hold": (frames.Hold, One(HOLD)),
    },
)
PARENT_FRAME: Union[frames.ParentFrame] = Union(
    "a parent's frame",
    {
        "message": (frames.Said, _Said(One(FROM_PARENT))),
        "offer": (frames.Offer, One(OFFER)),
    },
)

# ---------------------------------------------------------------- greeting

SHAPES = Each(record(transfer.Parameter, frames.ParameterShape, names=MANY, shape=MANY))
LAYOUT = record(transfer.Layout, frames.LayoutShape, parameters=SHAPES, constants=SHAPES)
DATASETS = Each(record(service.Dataset, frames.DatasetShape, samples=MAYBE))
HELLO = record(service.HelloRequest, frames.Hello, role=PEER_ROLE, features=MANY, instance=ID)
GREETING = record(
    service.HelloReply, frames.Greeting, features=MANY, layout=One(LAYOUT), datasets=DATASETS
)

# ---------------------------------------------------------------- calls

BEGUN = record(
    transfer.BeginReply, frames.Begun, transfer=ID, received=RECEIVED, endpoints=ENDPOINTS
)
FETCH = record(transfer.DownloadRequest, frames.Fetch, transfer=ID, received=RECEIVED)
OBSERVE = record(service.ObserveRequest, frames.Observe, after=MAYBE)
EVALUATION = record(service.Evaluation, frames.Evaluation)


class _Observed:
    """There is a manifest exactly when there is a transfer."""

    fields = record(
        service.ObserveReply, frames.Observed, transfer=Maybe(ID), manifest=Maybe(One(MANIFEST))
    )

    def fill(self, proto: service.ObserveReply, value: frames.Observed) -> None:
        self.fields.fill(proto, value)

    def read(self, proto: service.ObserveReply) -> frames.Observed:
        observed = self.fields.read(proto)
        if (observed.transfer is None) != (observed.manifest is None):
            raise MalformedMessage("a model is offered without a manifest, or the other way round")
        return observed


FORMS: Mapping[str, tuple[Form[Any], Form[Any]]] = {
    "Hello": (Form(service.HelloRequest, HELLO), Form(service.HelloReply, GREETING)),
    "Talk": (Form(service.ChildFrame, CHILD_FRAME), Form(service.ParentFrame, PARENT_FRAME)),
    "Begin": (Form(transfer.BeginRequest, BEGIN), Form(transfer.BeginReply, BEGUN)),
    "Upload": (
        _UploadForm(transfer.UploadFrame, UPLOAD_FRAME),
        Form(transfer.UploadReply, record(transfer.UploadReply, frames.Uploaded)),
    ),
    "Commit": (
        Form(transfer.CommitRequest, record(transfer.CommitRequest, frames.Commit, transfer=ID)),
        Form(transfer.CommitReply, Empty()),
    ),
    "Download": (Form(transfer.DownloadRequest, FETCH), _ChunkForm(transfer.Chunk, CHUNK)),
    "Constants": (Form(service.ConstantsRequest, Empty()), Form(transfer.Blob, Only("data"))),
    "Status": (Form(service.StatusRequest, Empty()), Form(service.StatusReply, Only("status"))),
    "Observe": (Form(service.ObserveRequest, OBSERVE), Form(service.ObserveReply, _Observed())),
    "ReportEvaluation": (
        Form(service.Evaluation, EVALUATION),
        Form(service.EvaluationReply, Empty()),
    ),
}


@dataclass(frozen=True)
class Method:
    """One call of a service: what streams, and what turns frames into bytes and back.

    The decoding ones raise :class:`MalformedMessage`. ``None`` is the frame of a message without
    fields, and text or bytes of one that is nothing but that.
    """

    service: str
    name: str
    request_stream: bool
    response_stream: bool
    encode_request: Encode
    decode_request: Decode
    encode_reply: Encode
    decode_reply: Decode


def _method(service_name: str, descriptor: Any) -> Method:
    request, reply = FORMS[descriptor.name]
    assert request.proto.DESCRIPTOR is descriptor.input_type, descriptor.name
    assert reply.proto.DESCRIPTOR is descriptor.output_type, descriptor.name
    return Method(
        service=service_name,
        name=descriptor.name,
        request_stream=descriptor.client_streaming,
        response_stream=descriptor.server_streaming,
        encode_request=request.encode,
        decode_request=request.decode,
        encode_reply=reply.encode,
        decode_reply=reply.decode,
    )


_SERVICES = service.DESCRIPTOR.services_by_name.values()
SERVICE_NAMES: tuple[str, ...] = tuple([found.full_name for found in _SERVICES])
METHODS: Mapping[str, Method] = {
    method.name: _method(found.full_name, method) for found in _SERVICES for method in found.methods
}
