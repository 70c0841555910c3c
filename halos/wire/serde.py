"""Between plain data and protobuf: the only module that imports what protoc generated.

Each kind of data has a pair of functions; :data:`METHODS` has those that each call needs. What
comes from a peer is checked here for its form, and nothing else: :class:`MalformedMessage`. Fields
that are not known are passed over, so that neighbouring versions understand each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from halos.core import messages as core
from halos.core.samples import Block, Lease, Range, Report
from halos.core.tensors import NOTHING, RefusalReason
from halos.wire import frames
from halos.wire.v1 import messages_pb2 as pb
from halos.wire.v1 import service_pb2 as service
from halos.wire.v1 import transfer_pb2 as transfer

ID_BYTES = 16
REASONS = frozenset(get_args(RefusalReason))
SERVICE_NAMES = tuple(
    descriptor.full_name for descriptor in service.DESCRIPTOR.services_by_name.values()
)

T = TypeVar("T")
P = TypeVar("P", bound=Proto)


class MalformedMessage(ValueError):  # noqa: N818  the peer's fault
    """Bytes from a peer that are no message of this protocol."""


# ---------------------------------------------------------------- by name, field by field


def _filled(proto: P, value: Any, **besides: Any) -> P:
    """Copy a dataclass's fields into those of the same names; ``besides`` replace some."""
    for name in (field.name for field in dataclasses.fields(value)):
        given = besides[name] if name in besides else getattr(value, name)
        if given is None or name == "payload":
            continue
        if isinstance(given, Proto):
            getattr(proto, name).CopyFrom(given)
        elif isinstance(given, list | tuple):
            getattr(proto, name).extend(given)
        else:
            setattr(proto, name, given)
    return proto


def _read(kind: Callable[..., T], proto: Proto, **besides: Any) -> T:
    """The inverse: make a ``kind`` of the fields of the same names."""
    values = dict(besides)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            continue
        if field.name == "payload":
            values["payload"] = NOTHING
            continue
        descriptor = proto.DESCRIPTOR.fields_by_name[field.name]
        if descriptor.has_presence and not proto.HasField(field.name):
            values[field.name] = None
        elif descriptor.is_repeated:
            values[field.name] = tuple(getattr(proto, field.name))
        else:
            values[field.name] = getattr(proto, field.name)
    return kind(**values)


# ---------------------------------------------------------------- samples


def _range(span: Range) -> pb.Range:
    return pb.Range(start=span[0], end=span[1])


def _ranges(protos: Iterable[pb.Range]) -> tuple[Range, ...]:
    ranges = tuple([(proto.start, proto.end) for proto in protos])
    for start, end in ranges:
        if start > end:
            raise MalformedMessage(f"samples {start} to {end} are no range")
    return ranges


def _lease(lease: Lease) -> pb.Lease:
    return _filled(pb.Lease(), lease, ranges=[_range(span) for span in lease.ranges])


def _read_lease(proto: pb.Lease) -> Lease:
    return _read(Lease, proto, ranges=_ranges(proto.ranges))


def _block(block: Block) -> pb.Block:
    return pb.Block(
        dataset=block.dataset,
        origin=block.origin,
        range=pb.Range(start=block.start, end=block.end),
        progress=block.progress,
    )


def _read_block(proto: pb.Block) -> Block:
    ((start, end),) = _ranges([proto.range])
    return Block(proto.dataset, proto.origin, start, end, proto.progress)


def _report(report: Report) -> pb.Report:
    return _filled(
        pb.Report(),
        report,
        contained=[_range(span) for span in report.contained],
        dropped=[_range(span) for span in report.dropped],
    )


def _read_report(proto: pb.Report) -> Report:
    return _read(Report, proto, contained=_ranges(proto.contained), dropped=_ranges(proto.dropped))


# ---------------------------------------------------------------- the core's messages


KINDS: Mapping[str, tuple[type[core.Message], type[Proto]]] = {
    "join": (core.Join, pb.Join),
    "heartbeat": (core.Heartbeat, pb.Heartbeat),
    "leave": (core.Leave, pb.Leave),
    "ready": (core.Ready, pb.Ready),
    "resume": (core.Resume, pb.Resume),
    "block_request": (core.BlockRequest, pb.BlockRequest),
    "worker_update": (core.WorkerUpdate, pb.WorkerUpdate),
    "push": (core.Push, pb.Push),
    "welcome": (core.Welcome, pb.Welcome),
    "heartbeat_seen": (core.HeartbeatSeen, pb.HeartbeatSeen),
    "assignment": (core.Assignment, pb.Assignment),
    "receipt": (core.Receipt, pb.Receipt),
    "resumed": (core.Resumed, pb.Resumed),
    "grant": (core.Grant, pb.Grant),
    "drain": (core.Drain, pb.Drain),
    "push_answer": (core.PushAnswer, pb.PushAnswer),
    "refused": (core.Refused, pb.Refused),
    "stop": (core.Stop, pb.Stop),
}
NAMES = {kind: name for name, (kind, _) in KINDS.items()}


def message_to_proto(message: core.Message) -> pb.Message:
    """Without tensors: a payload is not part of what this gives."""
    besides: dict[str, Any] = {}
    match message:
        case core.Join():
            besides["role"] = _role(message.role)
        case core.Push():
            besides["report"] = _report(message.report)
        case core.Assignment():
            besides["lease"] = _lease(message.lease)
        case core.Grant():
            besides["blocks"] = [_block(block) for block in message.blocks]
        case _:
            pass
    name = NAMES[type(message)]
    return pb.Message(**{name: _filled(KINDS[name][1](), message, **besides)})  # type: ignore[arg-type]


def message_from_proto(proto: pb.Message) -> core.Message:
    """A message that carries tensors gets the payload ``NOTHING``; but a ``Resumed`` none."""
    name = proto.WhichOneof("kind")
    if name is None:
        raise MalformedMessage("a message of a kind that this version does not know")
    kind, inner = KINDS[name][0], getattr(proto, name)
    besides: dict[str, Any] = {}
    if kind is core.Join:
        besides["role"] = _read_core_role(inner.role)
    elif kind is core.Push:
        besides["report"] = _read_report(inner.report)
    elif kind is core.Assignment:
        besides["lease"] = _read_lease(inner.lease)
    elif kind is core.Grant:
        besides["blocks"] = tuple([_read_block(block) for block in inner.blocks])
    elif kind is core.Resumed:
        besides["payload"] = None
    elif kind is core.Refused and inner.reason not in REASONS:
        raise MalformedMessage(f"{inner.reason!r} is no reason that this version knows")
    return _read(kind, inner, **besides)


ROLES: Mapping[str, pb.Role] = {
    "worker": pb.ROLE_WORKER,
    "server": pb.ROLE_SERVER,
    "observer": pb.ROLE_OBSERVER,
}
ROLE_NAMES: Mapping[int, Any] = {number: name for name, number in ROLES.items()}


def _role(role: str) -> pb.Role:
    return ROLES[role]


def _read_role(number: int) -> frames.PeerRole:
    role: frames.PeerRole | None = ROLE_NAMES.get(number)
    if role is None:
        raise MalformedMessage(f"{number} is no role that this version knows")
    return role


def _read_core_role(number: int) -> core.Role:
    role = _read_role(number)
    if role == "observer":
        raise MalformedMessage("an observer does not join")
    return role


# ---------------------------------------------------------------- payloads


CODECS: Mapping[frames.CodecName, transfer.Codec] = {
    "fp32": transfer.CODEC_FP32,
    "bf16": transfer.CODEC_BF16,
}
CODEC_NAMES: Mapping[int, frames.CodecName] = {number: name for name, number in CODECS.items()}


def _manifest(manifest: frames.Manifest) -> transfer.Manifest:
    return transfer.Manifest(
        content=manifest.content,
        fragments=[
            transfer.FragmentHeader(elements=header.elements, codec=CODECS[header.codec])
            for header in manifest.fragments
        ],
    )


def _read_manifest(proto: transfer.Manifest) -> frames.Manifest:
    return frames.Manifest(
        _id(proto.content, "content"), tuple([_read_header(h) for h in proto.fragments])
    )


def _read_header(proto: transfer.FragmentHeader) -> frames.FragmentHeader:
    codec = CODEC_NAMES.get(proto.codec)
    if codec is None:
        raise MalformedMessage(f"{proto.codec} is no codec that this version knows")
    return frames.FragmentHeader(proto.elements, codec)


def _id(value: bytes, what: str) -> bytes:
    if len(value) != ID_BYTES:
        raise MalformedMessage(f"{what} is of {len(value)} bytes, not {ID_BYTES}")
    return value


def _progress(progress: Iterable[frames.Progress]) -> list[transfer.Progress]:
    return [transfer.Progress(fragment=p.fragment, elements=p.elements) for p in progress]


def _read_progress(protos: Iterable[transfer.Progress]) -> tuple[frames.Progress, ...]:
    return tuple([frames.Progress(p.fragment, p.elements) for p in protos])


def _endpoints(endpoints: Iterable[frames.Endpoint]) -> list[transfer.Endpoint]:
    return [_filled(transfer.Endpoint(), endpoint) for endpoint in endpoints]


def _read_endpoints(protos: Iterable[transfer.Endpoint]) -> tuple[frames.Endpoint, ...]:
    return tuple([_read(frames.Endpoint, proto) for proto in protos])


def chunk_to_proto(chunk: frames.Chunk) -> transfer.Chunk:
    return transfer.Chunk(
        fragment=chunk.fragment,
        offset=chunk.offset,
        count=chunk.count,
        crc32=chunk.crc32,
        data=chunk.data,
    )


def chunk_from_proto(proto: transfer.Chunk) -> frames.Chunk:
    if len(proto.data) > frames.CHUNK_BYTES:
        raise MalformedMessage(f"a chunk of {len(proto.data)} bytes is too large")
    return frames.Chunk(proto.fragment, proto.offset, proto.count, proto.crc32, proto.data)


# ---------------------------------------------------------------- greeting


def hello_to_proto(hello: frames.Hello) -> service.HelloRequest:
    return _filled(service.HelloRequest(), hello, role=_role(hello.role))


def hello_from_proto(proto: service.HelloRequest) -> frames.Hello:
    _id(proto.instance, "instance")
    return _read(frames.Hello, proto, role=_read_role(proto.role))


def _shape(shape: frames.ParameterShape) -> transfer.Parameter:
    return _filled(transfer.Parameter(), shape)


def _read_shapes(protos: Iterable[transfer.Parameter]) -> tuple[frames.ParameterShape, ...]:
    shapes = tuple([_read(frames.ParameterShape, proto) for proto in protos])
    if any(not shape.names for shape in shapes):
        raise MalformedMessage("a parameter has no name")
    return shapes


def greeting_to_proto(greeting: frames.Greeting) -> service.HelloReply:
    layout = transfer.Layout(
        parameters=[_shape(shape) for shape in greeting.layout.parameters],
        constants=[_shape(shape) for shape in greeting.layout.constants],
        hash=greeting.layout.hash,
    )
    datasets = [_filled(service.Dataset(), dataset) for dataset in greeting.datasets]
    return _filled(service.HelloReply(), greeting, layout=layout, datasets=datasets)


def greeting_from_proto(proto: service.HelloReply) -> frames.Greeting:
    layout = frames.LayoutShape(
        _read_shapes(proto.layout.parameters),
        _read_shapes(proto.layout.constants),
        proto.layout.hash,
    )
    datasets = tuple([_read(frames.DatasetShape, dataset) for dataset in proto.datasets])
    return _read(frames.Greeting, proto, layout=layout, datasets=datasets)


# ---------------------------------------------------------------- talk


def child_frame_to_proto(frame: frames.ChildFrame) -> service.ChildFrame:
    match frame:
        case frames.Said(channel, message):
            return service.ChildFrame(
                channel=service.Channel.Name(channel.value),  # type: ignore[arg-type]
                message=message_to_proto(message),
            )
        case frames.Fetched(transfer_id):
            return service.ChildFrame(fetched=transfer_id)
        case frames.Telemetry(status):
            return service.ChildFrame(telemetry=status)
        case frames.Hold(name, instance):
            return service.ChildFrame(hold=service.Hold(name=name, instance=instance))


def child_frame_from_proto(proto: service.ChildFrame) -> frames.ChildFrame:
    match proto.WhichOneof("kind"):
        case "message":
            return frames.Said(_channel(proto.channel), message_from_proto(proto.message))
        case "fetched":
            return frames.Fetched(_id(proto.fetched, "transfer"))
        case "telemetry":
            return frames.Telemetry(proto.telemetry)
        case "hold":
            return frames.Hold(proto.hold.name, _id(proto.hold.instance, "instance"))
        case _:
            raise MalformedMessage("a child's frame of a kind that this version does not know")


def parent_frame_to_proto(frame: frames.ParentFrame) -> service.ParentFrame:
    match frame:
        case frames.Said(channel, message):
            return service.ParentFrame(
                channel=service.Channel.Name(channel.value),  # type: ignore[arg-type]
                message=message_to_proto(message),
            )
        case frames.Offer():
            offer = transfer.Offer(
                message=message_to_proto(frame.message),
                transfer=frame.transfer,
                manifest=_manifest(frame.manifest),
                endpoints=_endpoints(frame.endpoints),
            )
            return service.ParentFrame(offer=offer)


def parent_frame_from_proto(proto: service.ParentFrame) -> frames.ParentFrame:
    match proto.WhichOneof("kind"):
        case "message":
            return frames.Said(_channel(proto.channel), message_from_proto(proto.message))
        case "offer":
            offer = proto.offer
            return frames.Offer(
                _carrying(message_from_proto(offer.message)),
                _id(offer.transfer, "transfer"),
                _read_manifest(offer.manifest),
                _read_endpoints(offer.endpoints),
            )
        case _:
            raise MalformedMessage("a parent's frame of a kind that this version does not know")


def _carrying(message: core.Message) -> core.Message:
    """Whether a message that comes with a manifest is one that carries tensors."""
    if not hasattr(message, "payload"):
        raise MalformedMessage(f"a {type(message).__name__} carries no tensors")
    return message


def _channel(number: int) -> frames.Channel:
    try:
        return frames.Channel(number)
    except ValueError:
        raise MalformedMessage(f"{number} is no channel that this version knows") from None


# ---------------------------------------------------------------- moving tensors


def begin_to_proto(begin: frames.Begin) -> transfer.BeginRequest:
    return transfer.BeginRequest(
        header=_filled(transfer.Header(), begin.header),
        message=message_to_proto(begin.message),
        manifest=_manifest(begin.manifest),
        parts=begin.parts,
    )


def begin_from_proto(proto: transfer.BeginRequest) -> frames.Begin:
    return frames.Begin(
        _read(frames.Header, proto.header),
        _carrying(message_from_proto(proto.message)),
        _read_manifest(proto.manifest),
        proto.parts,
    )


def begun_to_proto(begun: frames.Begun) -> transfer.BeginReply:
    return transfer.BeginReply(
        transfer=begun.transfer,
        received=_progress(begun.received),
        endpoints=_endpoints(begun.endpoints),
    )


def begun_from_proto(proto: transfer.BeginReply) -> frames.Begun:
    return frames.Begun(
        _id(proto.transfer, "transfer"),
        _read_progress(proto.received),
        _read_endpoints(proto.endpoints),
    )


def upload_frame_to_proto(frame: frames.UploadFrame) -> transfer.UploadFrame:
    match frame:
        case frames.Part(transfer_id, part):
            return transfer.UploadFrame(part=transfer.Part(transfer=transfer_id, part=part))
        case frames.Chunk():
            return transfer.UploadFrame(chunk=chunk_to_proto(frame))


def upload_frame_from_proto(proto: transfer.UploadFrame) -> frames.UploadFrame:
    match proto.WhichOneof("kind"):
        case "part":
            return frames.Part(_id(proto.part.transfer, "transfer"), proto.part.part)
        case "chunk":
            return chunk_from_proto(proto.chunk)
        case _:
            raise MalformedMessage("an upload's frame of a kind that this version does not know")


def fetch_to_proto(fetch: frames.Fetch) -> transfer.DownloadRequest:
    return transfer.DownloadRequest(transfer=fetch.transfer, received=_progress(fetch.received))


def fetch_from_proto(proto: transfer.DownloadRequest) -> frames.Fetch:
    return frames.Fetch(_id(proto.transfer, "transfer"), _read_progress(proto.received))


# ---------------------------------------------------------------- control


def observed_to_proto(seen: frames.Observed) -> service.ObserveReply:
    manifest = _manifest(seen.manifest) if seen.manifest is not None else None
    return _filled(service.ObserveReply(), seen, manifest=manifest)


def observed_from_proto(proto: service.ObserveReply) -> frames.Observed:
    there = proto.HasField("transfer")
    return _read(
        frames.Observed,
        proto,
        transfer=_id(proto.transfer, "transfer") if there else None,
        manifest=_read_manifest(proto.manifest) if there else None,
    )


# ---------------------------------------------------------------- methods


@dataclass(frozen=True)
class Method:
    """One call of a service: its streams, and what turns frames into bytes and back."""

    service: str
    name: str
    request_stream: bool
    response_stream: bool
    encode_request: Callable[[Any], bytes]
    decode_request: Callable[[bytes], Any]
    encode_reply: Callable[[Any], bytes]
    decode_reply: Callable[[bytes], Any]


@dataclass(frozen=True)
class _Form:
    """A protobuf type, and the pair of functions between it and plain data."""

    proto: type[Proto]
    to: Callable[[Any], Proto]
    of: Callable[[Any], Any]

    def encode(self, value: Any) -> bytes:
        return self.to(value).SerializeToString()

    def decode(self, data: bytes) -> Any:
        proto = self.proto()
        try:
            proto.ParseFromString(data)
        except DecodeError as error:
            raise MalformedMessage(f"these bytes are no {self.proto.DESCRIPTOR.name}") from error
        return self.of(proto)


def _empty(proto: type[Proto]) -> _Form:
    return _Form(proto, lambda _: proto(), lambda _: None)


def _plain(proto: type[Proto], kind: type[Any]) -> _Form:
    return _Form(proto, lambda value: _filled(proto(), value), lambda found: _read(kind, found))


FORMS: Mapping[str, tuple[_Form, _Form]] = {
    "Hello": (
        _Form(service.HelloRequest, hello_to_proto, hello_from_proto),
        _Form(service.HelloReply, greeting_to_proto, greeting_from_proto),
    ),
    "Talk": (
        _Form(service.ChildFrame, child_frame_to_proto, child_frame_from_proto),
        _Form(service.ParentFrame, parent_frame_to_proto, parent_frame_from_proto),
    ),
    "Begin": (
        _Form(transfer.BeginRequest, begin_to_proto, begin_from_proto),
        _Form(transfer.BeginReply, begun_to_proto, begun_from_proto),
    ),
    "Upload": (
        _Form(transfer.UploadFrame, upload_frame_to_proto, upload_frame_from_proto),
        _plain(transfer.UploadReply, frames.Uploaded),
    ),
    "Commit": (
        _Form(
            transfer.CommitRequest,
            lambda commit: transfer.CommitRequest(transfer=commit.transfer),
            lambda proto: frames.Commit(_id(proto.transfer, "transfer")),
        ),
        _empty(transfer.CommitReply),
    ),
    "Download": (
        _Form(transfer.DownloadRequest, fetch_to_proto, fetch_from_proto),
        _Form(transfer.Chunk, chunk_to_proto, chunk_from_proto),
    ),
    "Constants": (
        _empty(service.ConstantsRequest),
        _Form(
            transfer.Blob, lambda data: transfer.Blob(data=data), lambda proto: bytes(proto.data)
        ),
    ),
    "Status": (
        _empty(service.StatusRequest),
        _Form(
            service.StatusReply,
            lambda status: service.StatusReply(status=status),
            lambda proto: str(proto.status),
        ),
    ),
    "Observe": (
        _plain(service.ObserveRequest, frames.Observe),
        _Form(service.ObserveReply, observed_to_proto, observed_from_proto),
    ),
    "ReportEvaluation": (
        _plain(service.Evaluation, frames.Evaluation),
        _empty(service.EvaluationReply),
    ),
}


def _methods() -> dict[str, Method]:
    found = {}
    for descriptor in service.DESCRIPTOR.services_by_name.values():
        for method in descriptor.methods:
            request, reply = FORMS[method.name]
            found[method.name] = Method(
                service=descriptor.full_name,
                name=method.name,
                request_stream=bool(method.client_streaming),
                response_stream=bool(method.server_streaming),
                encode_request=request.encode,
                decode_request=request.decode,
                encode_reply=reply.encode,
                decode_reply=reply.decode,
            )
    return found


METHODS: Mapping[str, Method] = _methods()
