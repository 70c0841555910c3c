"""What a message is after it has gone over the wire, where there is none: within one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, get_args

from halos.core.fragments import Fragments
from halos.core.messages import FromChild, Message, Push, WorkerUpdate
from halos.core.tensors import NOTHING, NullPayload
from halos.wire.chunks import Staging, chunks, manifest_of
from halos.wire.frames import (
    NEWEST_PROTOCOL,
    Begin,
    Channel,
    Chunk,
    Codecs,
    Header,
    Manifest,
    Offer,
    Said,
)
from halos.wire.serde import METHODS

HEADER = Header(run="", protocol=NEWEST_PROTOCOL, specification_version=0, sender="")
TRANSFER = bytes(16)

T = TypeVar("T")


class RoundTrip:
    """Turns messages into the bytes that gRPC would carry, and these into messages again.

    A message of a simulation without tensors is passed on as it is.
    """

    def __init__(self, codecs: Codecs | None = None) -> None:
        """``codecs``: by default all is exact."""
        self.codecs = codecs or Codecs()

    def __call__(self, message: Message) -> Message:
        """An equal message, but for what its codec rounds; the two share no memory."""
        payload = getattr(message, "payload", None)
        if isinstance(payload, NullPayload):
            return message
        if payload is None:
            said = Said(Channel.NODE, message)
            answer: Message = (asked if isinstance(message, CHILDS) else told)("Talk", said).message
            return answer
        assert isinstance(payload, Fragments)
        return self._carried(message, payload)

    def _carried(self, message: Any, payload: Fragments) -> Message:
        """As an update that is announced and sent, or as a model that is offered and fetched."""
        bare = replace(message, payload=NOTHING)
        manifest = manifest_of(payload, self.codecs.of(message))
        came: Begin | Offer
        if isinstance(message, WorkerUpdate | Push):
            came = asked("Begin", Begin(HEADER, bare, manifest))
            arrived = _moved(payload, came.manifest, lambda chunk: asked("Upload", chunk))
        else:
            came = told("Talk", Offer(bare, TRANSFER, manifest))
            arrived = _moved(payload, came.manifest, lambda chunk: told("Download", chunk))
        # mypy does not see that of all messages only those that carry tensors come here.
        return replace(came.message, payload=arrived)  # type: ignore[arg-type]


CHILDS = get_args(FromChild)


def asked(method: str, frame: T) -> T:
    """A request as the server gets it."""
    back: T = METHODS[method].decode_request(METHODS[method].encode_request(frame))
    return back


def told(method: str, frame: T) -> T:
    """A reply as the child gets it."""
    back: T = METHODS[method].decode_reply(METHODS[method].encode_reply(frame))
    return back


def _moved(payload: Fragments, manifest: Manifest, over: Callable[[Chunk], Chunk]) -> Fragments:
    staging = Staging(manifest)
    for chunk in chunks(payload, manifest):
        staging.add(over(chunk))
    return staging.take()
