"""One of everything that travels, for the tests of the wire's form."""

from __future__ import annotations

import zlib
from dataclasses import replace

from halos.core import messages as core
from halos.core.samples import Block, Lease, Report
from halos.core.tensors import NOTHING
from halos.wire import frames
from halos.wire.serde import METHODS

A, B = bytes(range(16)), bytes(range(100, 116))
LEASE = Lease("us/0/3/7", "text", 1000, ((1000, 1064), (1100, 1110)), 1300)
REPORT = Report(3, 24, 4096, 9000.5, ((0, 64), (128, 192)), ((64, 128),))

CARRYING = {
    "worker_update": core.WorkerUpdate("us/0/3/7", 3, 17, 8, 512, 2.5, 0.125, 1.75, NOTHING),
    "push": core.Push(4, 2, 9, REPORT, NOTHING),
    "push, which holds a model": core.Push(4, 2, 9, REPORT, NOTHING, 0),
    "assignment": core.Assignment(5, 3, "us/0/3/6", LEASE, 8, 64, 18, NOTHING),
    "resumed": core.Resumed(2, 1, 4, True, 11, NOTHING),
    "push_answer": core.PushAnswer(4, 2, 10, NOTHING),
    "push_answer, a difference": core.PushAnswer(4, 2, 10, NOTHING, 2**32 - 1),
}
FROM_CHILD: dict[str, core.Message] = {
    "join": core.Join("worker", "first", "ab12", ("text", "code")),
    "heartbeat": core.Heartbeat(3),
    "leave": core.Leave(3),
    "ready": core.Ready(3, "us/0/3/7"),
    "ready, without a lease": core.Ready(3, None),
    "ready, with an empty lease": core.Ready(3, ""),
    "resume": core.Resume(2, 1, 4, True, 9, 6, 1),
    "block_request": core.BlockRequest(2, 7, 512, 4096),
    "worker_update": CARRYING["worker_update"],
    "push": CARRYING["push"],
    "push of nothing": core.Push(0, 0, 0, Report(), NOTHING),
}
FROM_PARENT: dict[str, core.Message] = {
    "welcome": core.Welcome(3),
    "heartbeat_seen": core.HeartbeatSeen(3),
    "assignment": CARRYING["assignment"],
    "assignment, the first": core.Assignment(1, 3, None, LEASE, 8, 64, 0, NOTHING),
    "receipt": core.Receipt(3, "us/0/3/7"),
    "resumed": core.Resumed(2, 1, 4, False, 11, None),
    "grant": core.Grant(2, 7, (Block("text", 0, 512, 1024, 2048), Block("code", 99, 99, 120, 0))),
    "drain": core.Drain(2, 7),
    "push_answer": CARRYING["push_answer"],
    "refused": core.Refused("fenced", "us/0/3/7", 2, "the fence is 3 by now"),
    "refused, without a fence": core.Refused("unknown_sender", "", None, ""),
    "stop": core.Stop(),
}

MANIFEST = frames.Manifest(
    A, (frames.FragmentHeader(1 << 22, "fp32"), frames.FragmentHeader(4097, "bf16"))
)
RECEIVED = (frames.Progress(0, 1 << 18), frames.Progress(1, 0))
ENDPOINTS = (frames.Endpoint(), frames.Endpoint("10.0.0.1:7443", 1, 3))
DATA = bytes(range(256)) * 2
CHUNK = frames.Chunk(1, 8192, 128, zlib.crc32(DATA), DATA)
LAYOUT = frames.LayoutShape(
    (frames.ParameterShape(("wte", "head"), (256, 64), "float32"),),
    (
        frames.ParameterShape(("scale",), (), "bfloat16"),
        frames.ParameterShape(("none",), (0, 3), "int64"),
    ),
    "cd34",
)
GREETING = frames.Greeting(
    1, ("a", "b"), "first", 2, "{}", LAYOUT,
    (frames.DatasetShape("text", 5000), frames.DatasetShape("code", None)), "root", "us",
)  # fmt: skip
HEADER = frames.Header("first", 1, 2, "us/0")
SEEN = frames.Observed(5, 6000, 70000, 12.5, False, B, MANIFEST)

REQUESTS: dict[str, dict[str, object]] = {
    "Hello": {
        "": frames.Hello("observer", "eve", A, "first", 1, 3, ("x",)),
        "plain": frames.Hello("worker", instance=B),
    },
    "Talk": {
        **{m: frames.Said(frames.Channel.NODE, message) for m, message in FROM_CHILD.items()},
        "session": frames.Said(frames.Channel.SESSION, FROM_CHILD["heartbeat"]),
        "hold": frames.Hold("us/0", A),
        "fetched": frames.Fetched(B),
        "telemetry": frames.Telemetry('{"tokens": 1}'),
    },
    "Begin": {
        "worker_update": frames.Begin(HEADER, CARRYING["worker_update"], MANIFEST, 2),
        "push": frames.Begin(HEADER, CARRYING["push"], MANIFEST),
        "push, which holds a model": frames.Begin(
            HEADER, CARRYING["push, which holds a model"], MANIFEST
        ),
    },
    "Upload": {
        "begin": frames.Begin(HEADER, CARRYING["push"], MANIFEST),
        "part": frames.Part(B, 1),
        "chunk": CHUNK,
        "first chunk": replace(CHUNK, fragment=0, offset=0),
        "empty chunk": frames.Chunk(0, 0, 0, 0, b""),
    },
    "Commit": {"": frames.Commit(B)},
    "Download": {"": frames.Fetch(B, RECEIVED), "from the start": frames.Fetch(B)},
    "Constants": {"": None},
    "Status": {"": None},
    "Observe": {"": frames.Observe(7, True), "any": frames.Observe(), "after 0": frames.Observe(0)},
    "ReportEvaluation": {"": frames.Evaluation(5, 6000, 70000, 12.5, 2.25, 512)},
}
REPLIES: dict[str, dict[str, object]] = {
    "Hello": {"": GREETING},
    "Talk": {
        **{m: frames.Said(frames.Channel.NODE, message) for m, message in FROM_PARENT.items()},
        "session": frames.Said(frames.Channel.SESSION, FROM_PARENT["welcome"]),
        "offered assignment": frames.Offer(CARRYING["assignment"], B, MANIFEST, ENDPOINTS),
        "offered resumed": frames.Offer(CARRYING["resumed"], B, MANIFEST),
        "offered push_answer": frames.Offer(CARRYING["push_answer"], B, MANIFEST),
        "offered difference": frames.Offer(CARRYING["push_answer, a difference"], B, MANIFEST),
    },
    "Begin": {"": frames.Begun(B, RECEIVED, ENDPOINTS)},
    "Upload": {"": frames.Uploaded(1 << 40)},
    "Commit": {"": None},
    "Download": {"": CHUNK},
    "Constants": {"": b"safe"},
    "Status": {"": "{}"},
    "Observe": {"": SEEN, "over": frames.Observed(5, 6000, 70000, 12.5, True)},
    "ReportEvaluation": {"": None},
}


def encoded() -> dict[str, str]:
    """The bytes of all of these, in hexadecimal."""
    found = {}
    for name, method in METHODS.items():
        for what, frame in REQUESTS[name].items():
            found[f"{name} request {what}".strip()] = method.encode_request(frame).hex()
        for what, frame in REPLIES[name].items():
            found[f"{name} reply {what}".strip()] = method.encode_reply(frame).hex()
    return found
