"""What a trace looks like, and that it can be read whatever happened to its writer."""

from __future__ import annotations

import io
import json
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halos.core.fragments import Fragments
from halos.core.membership import MembershipSettings
from halos.core.messages import Assignment, Received, Resumed, Started
from halos.core.samples import Lease
from halos.core.tensors import NOTHING, Payload
from halos.core.worker import Worker
from halos.errors import UserError
from halos.runtime.dispatcher import Step
from halos.runtime.trace import (
    Describer,
    RunFacts,
    TraceWriter,
    open_trace,
    parse_trace,
    read_trace,
)
from halos.specification import MembershipTable

FACTS = RunFacts(
    run="run",
    model="hash",
    datasets=("text",),
    seed=3,
    servers={"root": None, "us": "root"},
    workers={"us/0": "us"},
    membership=MembershipSettings(retry_s=7),
)


def started(node: str, time: float = 0.0) -> Step:
    return Step(time, node, Started(), [], Worker(node, "us"))


def assigned(payload: Payload) -> Received:
    lease = Lease("l", "text", 0, ((0, 4),), 0)
    return Received("us", Assignment(1, 1, None, lease, 2, 2, 0, payload))


def test_a_payload_is_told_by_its_bytes_and_checksum() -> None:
    parts = [torch.arange(3.0), torch.tensor(2.0, dtype=torch.bfloat16), torch.empty(0)]
    content = b"".join(t.view(-1).view(torch.uint8).numpy().tobytes() for t in parts)
    described = Describer().event(assigned(Fragments(parts)))
    assert described["message"]["payload"] == {"bytes": 14, "crc32": zlib.crc32(content)}


def test_a_payload_without_tensors_has_no_checksum() -> None:
    assert Describer().event(assigned(NOTHING))["message"]["payload"] == {"bytes": 0}
    none = Describer().event(Received("us", Resumed(1, 1, 0, True, 0, None)))
    assert none["message"]["payload"] is None


def test_a_checksum_is_taken_once_a_payload() -> None:
    describer, payload = Describer(), Fragments([torch.zeros(4)])
    first = describer.event(assigned(payload))
    payload.tensors[0].fill_(1)  # which nobody may do: it shows that it was not read again
    assert describer.event(assigned(payload)) == first
    assert describer.event(assigned(payload.copy())) != first


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with open_trace(path) as file:
        write = TraceWriter(file, FACTS)
        write(started("us/0", 0.1 + 0.2))
        trace = read_trace(path)  # all of it is there before the file is closed
    assert trace.starts == (FACTS,)
    (line,) = trace.lines
    assert (line.where, line.start, line.node) == (f"{path}:2", 1, "us/0")
    assert line.content["time"] == 0.1 + 0.2
    assert list(line.content) == ["time", "node", "event", "effects", "version", "staleness"]


def test_threads_write_whole_lines() -> None:
    file = io.StringIO()
    write = TraceWriter(file)

    def some(name: str) -> None:
        for i in range(300):
            write(started(name, i))

    threads = [threading.Thread(target=some, args=(f"us/{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = parse_trace("trace", file.getvalue().splitlines()).lines
    for i in range(4):
        times = [line.content["time"] for line in lines if line.node == f"us/{i}"]
        assert times == list(range(300))


@pytest.mark.parametrize("left", [1, 40])
def test_a_process_that_was_killed_amid_a_line_goes_on_in_the_same_file(
    tmp_path: Path, left: int
) -> None:
    path = tmp_path / "trace.jsonl"
    for start in range(2):
        with open_trace(path) as file:
            write = TraceWriter(file, FACTS)
            write(started("us/0", start))
            write(started("us/1", start))
        whole = path.read_text()
        last = whole.rstrip("\n").rpartition("\n")[2]
        path.write_text(whole[: len(whole) - len(last) - 1 + left])
    trace = read_trace(path)
    assert [(line.node, line.start) for line in trace.lines] == [("us/0", 1), ("us/0", 2)]
    assert trace.starts == (FACTS, FACTS)


def test_facts_hold_nothing_of_membership_but_what_nodes_know(tmp_path: Path) -> None:
    table = MembershipTable(retry_s=7, drain_timeout_s=9)
    facts = replace(FACTS, membership=table)
    assert RunFacts.from_json(json.loads(json.dumps(facts.to_json()))) == FACTS


def test_a_start_that_was_cut_off_is_no_start() -> None:
    facts = json.dumps({"run": FACTS.to_json()})
    trace = parse_trace("trace", [facts[:20], facts, facts[:50]])
    assert (trace.starts, trace.lines) == ((FACTS,), ())


@pytest.mark.parametrize(
    "lines", [["Dear diary", "{}"], ["[1]", '{"node": "us"}'], ['{"time": 1}'], ['{"run": "a"}']]
)
def test_what_is_no_trace_is_said_in_one_sentence(lines: list[str]) -> None:
    with pytest.raises(UserError, match=r"^notes.txt:1: is no line of a trace"):
        parse_trace("notes.txt", lines)


def test_a_trace_that_cannot_be_opened_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--trace .*: cannot be written to: Is a directory"):
        open_trace(tmp_path)
    with pytest.raises(UserError, match=r"none.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
