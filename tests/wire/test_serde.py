"""Everything that travels comes back as it was, and nothing else comes out of other bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import types
import zlib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halos.core import messages as core
from halos.core.samples import Block, Lease, Report
from halos.core.tensors import FRAGMENT_ELEMENTS, NOTHING, RefusalReason
from halos.wire import frames
from halos.wire.serde import (
    METHODS,
    SERVICE_NAMES,
    MalformedMessage,
    Method,
    message_bytes,
    message_from,
)
from halos.wire.v1 import messages_pb2, service_pb2, transfer_pb2
from tests.wire import samples
from tests.wire.samples import FROM_CHILD, FROM_PARENT, REPLIES, REQUESTS

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden.json").read_text())
SMALL = {  # 32 bits on the wire
    "oldest_protocol", "newest_protocol", "protocol", "fragment", "first_fragment", "fragments",
    "parts", "part", "crc32",
}  # fmt: skip

# ---------------------------------------------------------------- any of everything

COUNTS = st.integers(0, 2**63 - 1)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: COUNTS,
    str: st.text(max_size=20),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}


def any_of(kind: type, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A dataclass with any numbers and texts; ``special``: all fields of other types."""
    fields = {}
    for name, hint in get_type_hints(kind).items():
        if name in special:
            fields[name] = special[name]
        elif name in SMALL:
            fields[name] = st.integers(0, 2**32 - 1)
        elif isinstance(hint, types.UnionType):
            fields[name] = st.none() | PLAIN[get_args(hint)[0]]
        else:
            fields[name] = PLAIN[hint]
    return st.builds(kind, **fields)


def tuples_of(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=3).map(tuple)


TENSORS = st.just(NOTHING)
IDS = st.binary(min_size=16, max_size=16)
TEXTS = tuples_of(st.text(max_size=10))
RANGE = st.lists(COUNTS, min_size=2, max_size=2).map(lambda ends: tuple(sorted(ends)))
RANGES = tuples_of(RANGE)
BLOCKS = st.builds(
    lambda block, ends: dataclasses.replace(block, start=ends[0], end=ends[1]), any_of(Block), RANGE
)
RESUMED_APART = any_of(core.Resumed, payload=st.none())
UPDATES = any_of(core.WorkerUpdate, payload=TENSORS) | any_of(
    core.Push, report=any_of(Report, contained=RANGES, dropped=RANGES), payload=TENSORS
)
MODELS = any_of(core.PushAnswer, payload=TENSORS) | any_of(
    core.Assignment, lease=any_of(Lease, ranges=RANGES), payload=TENSORS
)
CHILDS = (
    any_of(core.Join, role=st.sampled_from(["worker", "server"]), datasets=TEXTS)
    | any_of(core.Heartbeat)
    | any_of(core.Leave)
    | any_of(core.Ready)
    | any_of(core.Resume)
    | any_of(core.BlockRequest)
    | UPDATES
)
PARENTS = (
    any_of(core.Welcome)
    | any_of(core.HeartbeatSeen)
    | any_of(core.Receipt)
    | RESUMED_APART
    | any_of(core.Grant, blocks=tuples_of(BLOCKS))
    | any_of(core.Drain)
    | any_of(core.Refused, reason=st.sampled_from(get_args(RefusalReason)))
    | st.just(core.Stop())
    | MODELS
)
CODECS = st.sampled_from(["fp32", "bf16"])
MANIFESTS = any_of(
    frames.Manifest,
    content=IDS,
    fragments=tuples_of(any_of(frames.FragmentHeader, codec=CODECS)),
)
BEGINS = any_of(frames.Begin, header=any_of(frames.Header), message=UPDATES, manifest=MANIFESTS)
RECEIVED = tuples_of(any_of(frames.Progress))
ENDPOINTS = tuples_of(any_of(frames.Endpoint))
CHUNKS = any_of(
    frames.Chunk,
    data=st.binary(max_size=300),
    count=st.integers(0, frames.CHUNK_BYTES),
)
CHANNELS = st.sampled_from(frames.Channel)
SHAPES = tuples_of(any_of(frames.ParameterShape, names=TEXTS, shape=tuples_of(COUNTS)))
LAYOUTS = any_of(frames.LayoutShape, parameters=SHAPES, constants=SHAPES)
OBSERVED = any_of(frames.Observed, transfer=IDS, manifest=MANIFESTS) | any_of(
    frames.Observed, transfer=st.none(), manifest=st.none()
)
OFFERED = MODELS | any_of(core.Resumed, payload=TENSORS)
NONE = st.none()
ANY: dict[str, tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    "Hello": (
        any_of(
            frames.Hello,
            role=st.sampled_from(["worker", "server", "observer"]),
            instance=IDS,
            features=TEXTS,
        ),
        any_of(
            frames.Greeting,
            features=TEXTS,
            layout=LAYOUTS,
            datasets=tuples_of(any_of(frames.DatasetShape)),
        ),
    ),
    "Talk": (
        any_of(frames.Said, channel=CHANNELS, message=CHILDS)
        | any_of(frames.Hold, instance=IDS)
        | any_of(frames.Fetched, transfer=IDS)
        | any_of(frames.Telemetry),
        any_of(frames.Said, channel=CHANNELS, message=PARENTS)
        | any_of(
            frames.Offer, message=OFFERED, transfer=IDS, manifest=MANIFESTS, endpoints=ENDPOINTS
        ),
    ),
    "Begin": (
        BEGINS,
        any_of(frames.Begun, transfer=IDS, received=RECEIVED, endpoints=ENDPOINTS),
    ),
    "Upload": (BEGINS | any_of(frames.Part, transfer=IDS) | CHUNKS, any_of(frames.Uploaded)),
    "Commit": (any_of(frames.Commit, transfer=IDS), NONE),
    "Download": (any_of(frames.Fetch, transfer=IDS, received=RECEIVED), CHUNKS),
    "Constants": (NONE, st.binary(max_size=100)),
    "Status": (NONE, st.text(max_size=20)),
    "Observe": (any_of(frames.Observe), OBSERVED),
    "ReportEvaluation": (any_of(frames.Evaluation), NONE),
}

EACH_METHOD = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def both(method: Method) -> list[tuple[dict[str, Any], Any, Any]]:
    """Samples, encoding and decoding of requests, then of replies."""
    return [
        (REQUESTS[method.name], method.encode_request, method.decode_request),
        (REPLIES[method.name], method.encode_reply, method.decode_reply),
    ]


@EACH_METHOD
@settings(max_examples=40)
@given(st.data())
def test_every_frame_comes_back_equal(method: Method, data: st.DataObject) -> None:
    requests, replies = ANY[method.name]
    request, reply = data.draw(requests), data.draw(replies)
    assert method.decode_request(method.encode_request(request)) == request
    assert method.decode_reply(method.encode_reply(reply)) == reply


@given(CHILDS | PARENTS)
def test_every_message_comes_back_equal(message: core.Message) -> None:
    assert message_from(message_bytes(message)) == message


def test_every_kind_of_message_is_among_the_samples() -> None:
    kinds = set(get_args(core.Message))
    assert {type(message) for message in (*FROM_CHILD.values(), *FROM_PARENT.values())} == kinds
    fields = messages_pb2.Message.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert len(fields) == len(kinds)


def test_bytes_of_version_1_are_still_understood() -> None:
    found = {}
    for method in METHODS.values():
        for kind, (frames_, _, decode) in zip(("request", "reply"), both(method), strict=True):
            for what, frame in frames_.items():
                name = f"{method.name} {kind} {what}".strip()
                found[name] = decode(bytes.fromhex(GOLDEN[name])) == frame
    assert all(found.values()), [name for name, same in found.items() if not same]
    assert found.keys() == GOLDEN.keys()


def test_a_loss_may_be_no_number() -> None:
    update = dataclasses.replace(samples.CARRYING["worker_update"], loss=math.nan, norm=math.inf)
    back = message_from(message_bytes(update))
    assert isinstance(back, core.WorkerUpdate)
    assert math.isnan(back.loss)
    assert back.norm == math.inf


def test_a_resumed_says_by_its_tensors_whether_there_is_a_model() -> None:
    talk = METHODS["Talk"]
    offer = REPLIES["Talk"]["offered resumed"]
    assert isinstance(offer, frames.Offer)
    back = talk.decode_reply(talk.encode_reply(offer))
    assert back.message.payload is NOTHING
    said = frames.Said(frames.Channel.NODE, FROM_PARENT["resumed"])
    assert talk.decode_reply(talk.encode_reply(said)).message.payload is None


@pytest.mark.parametrize("payload", [None, object()])
def test_tensors_do_not_slip_into_a_message(payload: Any) -> None:
    update = dataclasses.replace(samples.CARRYING["worker_update"], payload=payload)
    with pytest.raises(AssertionError, match=r"WorkerUpdate\.payload does not travel"):
        message_bytes(update)


# ---------------------------------------------------------------- other bytes


def either(decode: Any, data: bytes) -> None:
    """It is a frame or malformed, and nothing else."""
    with contextlib.suppress(MalformedMessage):
        decode(data)


@EACH_METHOD
@settings(max_examples=40)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff" * 12)
def test_random_bytes_are_a_frame_or_malformed(method: Method, data: bytes) -> None:
    either(method.decode_request, data)
    either(method.decode_reply, data)
    either(message_from, data)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Some bytes changed, left out, put in or cut off."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        new = draw(st.binary(max_size=3))
        data[at : at + draw(st.integers(0, 3))] = new
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@EACH_METHOD
@settings(max_examples=40)
@given(st.data())
def test_damaged_bytes_are_a_frame_or_malformed(method: Method, data: st.DataObject) -> None:
    for frames_, encode, decode in both(method):
        whole = encode(data.draw(st.sampled_from(list(frames_.values()))))
        either(decode, data.draw(damaged(whole)))


@EACH_METHOD
def test_fields_of_a_later_version_are_passed_over(method: Method) -> None:
    later = b"\xba\x3e\x03new" + b"\xc0\x3e\x01"  # numbers 999 and 1000, a text and a number
    for frames_, encode, decode in both(method):
        for frame in frames_.values():
            assert decode(encode(frame) + later) == frame


TALK = METHODS["Talk"]
NODE = service_pb2.CHANNEL_NODE
SAYS = {name: message_bytes(m) for name, m in {**FROM_CHILD, **FROM_PARENT}.items()}


def said(name: str, channel: int = NODE) -> bytes:
    message = messages_pb2.Message.FromString(SAYS[name])
    return service_pb2.ChildFrame(channel=channel, message=message).SerializeToString()


def of_message(**kind: Any) -> bytes:
    return messages_pb2.Message(**kind).SerializeToString()


def lease(**fields: Any) -> messages_pb2.Lease:
    return messages_pb2.Lease(id="a", dataset="d", **fields)


MALFORMED: dict[str, tuple[Any, bytes, str]] = {
    "no kind": (TALK.decode_request, b"", "a child's frame is of a kind that"),
    "no kind of message": (message_from, b"", "a message is of a kind that this version"),
    "no kind of reply": (TALK.decode_reply, b"", "a parent's frame is of a kind"),
    "no kind of upload": (METHODS["Upload"].decode_request, b"", "an upload's frame is of a kind"),
    "a parent's word of a child": (
        TALK.decode_request, said("welcome"), "welcome is not a message of a child",
    ),
    "a child's word of a parent": (
        TALK.decode_reply, said("heartbeat"), "heartbeat is not a message of a parent",
    ),
    "channel": (
        TALK.decode_request, said("heartbeat", 7),
        r"ChildFrame\.channel: 7 is not known in this version",
    ),
    "role": (
        message_from, of_message(join=messages_pb2.Join(role=9)),
        r"Join\.role: 9 is not known",
    ),
    "an observer that joins": (
        message_from, of_message(join=messages_pb2.Join(role=messages_pb2.ROLE_OBSERVER)),
        r"Join\.role: 3 is not known",
    ),
    "no role": (
        METHODS["Hello"].decode_request,
        service_pb2.HelloRequest(instance=samples.A).SerializeToString(),
        r"HelloRequest\.role: 0 is not known",
    ),
    "instance": (
        METHODS["Hello"].decode_request,
        service_pb2.HelloRequest(
            role=messages_pb2.ROLE_WORKER, instance=b"short"
        ).SerializeToString(),
        r"HelloRequest\.instance has 5 bytes, not 16",
    ),
    "reason": (
        message_from, of_message(refused=messages_pb2.Refused(reason="mood")),
        r"Refused\.reason: 'mood' is not known",
    ),
    "codec": (
        METHODS["Observe"].decode_reply,
        service_pb2.ObserveReply(
            transfer=samples.B,
            manifest=transfer_pb2.Manifest(
                content=samples.A, fragments=[transfer_pb2.FragmentHeader(elements=1)]
            ),
        ).SerializeToString(),
        r"FragmentHeader\.codec: 0 is not known",
    ),
    "transfer": (
        METHODS["Commit"].decode_request,
        transfer_pb2.CommitRequest(transfer=bytes(15)).SerializeToString(),
        r"CommitRequest\.transfer has 15 bytes, not 16",
    ),
    "a model without a manifest": (
        METHODS["Observe"].decode_reply,
        service_pb2.ObserveReply(transfer=samples.B).SerializeToString(),
        "without a manifest",
    ),
    "no lease": (
        message_from, of_message(assignment=messages_pb2.Assignment()),
        r"Assignment\.lease is missing",
    ),
    "no report": (
        message_from, of_message(push=messages_pb2.Push()), r"Push\.report is missing",
    ),
    "no header": (
        METHODS["Begin"].decode_request, b"", r"BeginRequest\.header is missing",
    ),
    "an update that is none": (
        METHODS["Begin"].decode_request,
        transfer_pb2.BeginRequest(
            header=transfer_pb2.Header(), message=messages_pb2.Message(stop=messages_pb2.Stop())
        ).SerializeToString(),
        "stop is not an update",
    ),
    "a backward range": (
        message_from,
        of_message(
            assignment=messages_pb2.Assignment(
                lease=lease(ranges=[messages_pb2.Range(start=5, end=4)])
            )
        ),
        "samples 5 to 4 are no range",
    ),
    "a number beyond counting": (
        message_from, of_message(welcome=messages_pb2.Welcome(fence=2**63)),
        r"Welcome\.fence: 9223372036854775808 is too large",
    ),
    "a block beyond counting": (
        message_from,
        of_message(
            grant=messages_pb2.Grant(
                blocks=[messages_pb2.Block(origin=2**64 - 1, range=messages_pb2.Range())]
            )
        ),
        r"Block\.origin: 18446744073709551615 is too large",
    ),
    "a chunk too long": (
        METHODS["Download"].decode_reply,
        transfer_pb2.Chunk(count=1, data=bytes(frames.CHUNK_BYTES + 1)).SerializeToString(),
        "are no chunk",
    ),
    "a chunk of too many": (
        METHODS["Upload"].decode_request,
        transfer_pb2.UploadFrame(
            chunk=transfer_pb2.Chunk(count=FRAGMENT_ELEMENTS + 1)
        ).SerializeToString(),
        "are no chunk",
    ),
    "text that is no UTF-8": (
        METHODS["Status"].decode_reply, b"\x0a\x02\xff\xfe", "4 bytes are no StatusReply",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_told_in_a_sentence(case: str) -> None:
    decode, data, sentence = MALFORMED[case]
    with pytest.raises(MalformedMessage, match=sentence):
        decode(data)


# ---------------------------------------------------------------- chunks by hand


def proto_of(chunk: frames.Chunk) -> transfer_pb2.Chunk:
    return transfer_pb2.Chunk(
        fragment=chunk.fragment,
        offset=chunk.offset,
        count=chunk.count,
        crc32=chunk.crc32,
        data=bytes(chunk.data),
    )


@given(CHUNKS)
@example(frames.Chunk(0, 0, 0, 0, b""))
@example(frames.Chunk(0, 0, 1 << 18, 0, bytes(1 << 20)))
def test_chunks_are_the_bytes_that_protobuf_makes(chunk: frames.Chunk) -> None:
    proto = proto_of(chunk)
    assert METHODS["Download"].encode_reply(chunk) == proto.SerializeToString()
    upload = transfer_pb2.UploadFrame(chunk=proto).SerializeToString()
    assert METHODS["Upload"].encode_request(chunk) == upload


@given(
    st.binary(max_size=60) | st.binary(max_size=40).map(lambda b: b"\x08\x01\x10\x02\x18\x03" + b)
)
@example(b"\x12\x02\x2a\x00")
@example(b"\x12\x04\x2a\x00\x2a\x00")
@example(b"\x2a\x00\x08\x01")  # out of order
@example(b"\x08\x01\x08\x02\x2a\x01a")  # twice: the last one counts
@example(b"\x08\xff\xff\xff\xff\xff\x01\x2a\x01a")  # more than 32 bits
@example(b"\x08\x81\x00\x2a\x01a")  # longer than it need be
@example(b"\x25\x01\x02")
def test_chunks_are_read_as_protobuf_reads_them(data: bytes) -> None:
    assert_same_reading(METHODS["Download"].decode_reply, transfer_pb2.Chunk, data)
    frame = b"\x12" + bytes([len(data)]) + data
    assert_same_reading(METHODS["Upload"].decode_request, transfer_pb2.UploadFrame, frame)
    assert_same_reading(METHODS["Upload"].decode_request, transfer_pb2.UploadFrame, data)


def assert_same_reading(decode: Any, proto: Any, data: bytes) -> None:
    try:
        mine = decode(data)
    except MalformedMessage:
        return  # whatever protobuf makes of it, it is refused
    if isinstance(mine, frames.Chunk):
        theirs = proto.FromString(data)
        found = theirs.chunk if proto is transfer_pb2.UploadFrame else theirs
        theirs = frames.Chunk(found.fragment, found.offset, found.count, found.crc32, found.data)
        assert mine == theirs


def test_the_data_of_a_chunk_is_not_copied_when_it_is_read() -> None:
    whole = bytes(1 << 20)
    chunk = frames.Chunk(3, 1 << 18, 1 << 18, zlib.crc32(whole), whole)
    for encode, decode in (
        (METHODS["Upload"].encode_request, METHODS["Upload"].decode_request),
        (METHODS["Download"].encode_reply, METHODS["Download"].decode_reply),
    ):
        data = encode(chunk)
        back = decode(data)
        assert back == chunk
        assert isinstance(back.data, memoryview)
        assert back.data.obj is data


# ---------------------------------------------------------------- services


def test_every_method_of_the_services_is_there() -> None:
    assert SERVICE_NAMES == ("halos.wire.v1.ParameterServer", "halos.wire.v1.Control")
    streams = {name: (m.request_stream, m.response_stream) for name, m in METHODS.items()}
    assert {name for name, s in streams.items() if s == (True, True)} == {"Talk"}
    assert {name for name, s in streams.items() if s == (True, False)} == {"Upload"}
    assert {name for name, s in streams.items() if s == (False, True)} == {"Download", "Constants"}
    assert streams.keys() == REQUESTS.keys() == REPLIES.keys() == ANY.keys()


def test_the_messages_are_known_without_torch() -> None:
    code = "import sys, halos.wire.serde; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
