"""One JSON line an event, in the same form from every driver, so that two runs can be diffed."""

from __future__ import annotations

import json
from typing import Any, TextIO

from halos.core.messages import Effect, Event, Push, Received, WorkerUpdate
from halos.core.server import Server
from halos.runtime.dispatcher import Step
from halos.store.encoding import describer


class TraceWriter:
    """An observer that writes (time, node, event, effects, version, staleness) to a file.

    ``version`` is the server's after the event; ``staleness`` is how many versions the applied
    update was behind. Both are ``null`` for other nodes and other events.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._describe = describer()

    def __call__(self, step: Step) -> None:
        self._file.write(json.dumps(self.line(step)) + "\n")

    def line(self, step: Step) -> dict[str, Any]:
        describe = self._describe.unstructure
        return {
            "time": step.time,
            "node": step.node,
            "event": describe(step.event, unstructure_as=Event),
            "effects": [describe(effect, unstructure_as=Effect) for effect in step.effects],
            "version": step.subject.state.version if isinstance(step.subject, Server) else None,
            "staleness": staleness(step),
        }


def staleness(step: Step) -> int | None:
    """Versions that the update of this step was behind the server that received it."""
    match step.event:
        case Received(_, WorkerUpdate(base_version=base) | Push(base_version=base)):
            assert isinstance(step.subject, Server)
            return step.subject.state.version - 1 - base
        case _:
            return None
