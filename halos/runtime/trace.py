"""One JSON line an event, in the same form from every driver, so that two runs can be diffed.

Written by :class:`TraceWriter`, read by :func:`read_trace`, and lived through again by
:class:`halos.runtime.replay.Replay`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from halos.core.membership import MembershipSettings
from halos.core.messages import Effect, Event, NodeId, Push, Received, WorkerUpdate
from halos.core.server import Server
from halos.errors import UserError
from halos.runtime.dispatcher import Step
from halos.store.encoding import describer


@dataclass(frozen=True)
class RunFacts:
    """What a replay has to know of the run, and of the process that wrote the trace.

    ``servers`` and ``workers`` are those of this process, each with its parent. ``threads`` is how
    many torch computes one operation with, which the last bits of training depend on.
    """

    run: str
    model: str  # ModelLayout.hash
    datasets: tuple[str, ...]
    seed: int
    servers: Mapping[NodeId, NodeId | None]
    workers: Mapping[NodeId, NodeId]
    membership: MembershipSettings
    threads: int = field(default_factory=torch.get_num_threads)
    torch: str = str(torch.__version__)
    apart: bool = False  # as in RunPlan

    def to_json(self) -> dict[str, Any]:
        fields = set(MembershipSettings.model_fields)  # a subclass has others
        return {**asdict(self), "membership": self.membership.model_dump(include=fields)}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> RunFacts:
        """Raises ``TypeError``, ``KeyError`` or ``ValueError`` for anything else."""
        membership = MembershipSettings.model_validate(given["membership"])
        return cls(**{**given, "datasets": tuple(given["datasets"]), "membership": membership})


class Describer:
    """Turns steps into what a trace line holds. Any number of threads may use it at once."""

    def __init__(self) -> None:
        self._converter = describer()

    def event(self, event: Event) -> dict[str, Any]:
        described: dict[str, Any] = self._converter.unstructure(event, unstructure_as=Event)
        return described

    def line(self, step: Step) -> dict[str, Any]:
        return {
            "time": step.time,
            "node": step.node,
            "event": self.event(step.event),
            "effects": [
                self._converter.unstructure(effect, unstructure_as=Effect)
                for effect in step.effects
            ],
            "version": step.subject.state.version if isinstance(step.subject, Server) else None,
            "staleness": staleness(step),
        }


class TraceWriter:
    """An observer that writes (time, node, event, effects, version, staleness) to a file.

    ``version`` is the server's after the event; ``staleness`` is how many versions the applied
    update was behind. Both are ``null`` for other nodes and other events. With ``facts``, a line
    ``{"run": ...}`` comes first: where a process was started again, its trace has another.

    Any number of threads may call it at once, and every line is handed to the system before the
    next: a process that is killed leaves whole lines, but for the last at most.
    """

    def __init__(self, file: TextIO, facts: RunFacts | None = None) -> None:
        self._file = file
        self._describer = Describer()
        self._lock = threading.Lock()
        if facts is not None:
            self._write({"run": facts.to_json()})

    def __call__(self, step: Step) -> None:
        self._write(self._describer.line(step))

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        with self._lock:
            self._file.write(text)
            self._file.flush()


def staleness(step: Step) -> int | None:
    """Versions that the update of this step was behind the server that received it."""
    match step.event:
        case Received(_, WorkerUpdate(base_version=base) | Push(base_version=base)):
            assert isinstance(step.subject, Server)
            return step.subject.state.version - 1 - base
        case _:
            return None


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One event as it was recorded. ``where`` is ``file:line``.

    ``start`` counts the starts of the process that wrote it, as far as its trace tells.
    """

    where: str
    start: int
    node: NodeId
    text: str

    @property
    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.text)
        return content


@dataclass(frozen=True)
class Trace:
    """What one file holds.

    ``starts`` are the facts that the process which wrote it began with, each time.
    """

    source: str
    lines: tuple[TraceLine, ...]
    starts: tuple[RunFacts, ...]


def open_trace(path: Path) -> TextIO:
    """Open for appending, on a line of its own. Raises ``UserError`` if it cannot be written."""
    try:
        broken = path.is_file() and _ends_amid_a_line(path)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--trace {path}: cannot be written to: {error.strerror}") from error
    if broken:
        file.write("\n")
    return file


def _ends_amid_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_trace(path: Path) -> Trace:
    """Raises ``UserError`` if the file cannot be read or is no trace."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return parse_trace(str(path), file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def parse_trace(source: str, texts: Iterable[str]) -> Trace:
    """The trace in these lines, the last of each start perhaps cut off by the end of its process.

    ``source`` names it in errors. Raises ``UserError`` for a line that is of no trace.
    """
    lines: list[TraceLine] = []
    starts: list[RunFacts] = []
    cut_off: str | None = None
    for number, text in enumerate(texts, 1):
        where = f"{source}:{number}"
        content = _parsed(text)
        begins = content is not None and "run" in content
        if cut_off is not None and not begins:
            raise UserError(f"{cut_off}: is no line of a trace; give a file that --trace wrote")
        cut_off = where if content is None else None
        try:
            if content is not None and begins:
                starts.append(RunFacts.from_json(content["run"]))
            elif content is not None:
                lines.append(TraceLine(where, len(starts), content["node"], text))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"{where}: is no line of a trace of this version ({error})") from error
    return Trace(source, tuple(lines), tuple(starts))


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) and content else None
