"""Wide-area links that round what crosses them, as the run's own do: the core makes up for it.

Values are really rounded; how many bytes they take is the codec's size before its last stage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from halos.codec.codecs import CODECS
from halos.core.fragments import Fragments
from halos.core.messages import Message, NodeId, Push, PushAnswer
from halos.core.state import Roundings
from halos.wire.chunks import arrives
from halos.wire.frames import CodecName, Codecs

MANY = 1 << 20  # elements, of which a codec's size is taken


def ratio(codec: CodecName) -> float:
    """Bytes on the link as a share of those in fp32."""
    return CODECS[codec].size(MANY) / (4 * MANY)


class RoundedLinks:
    """Between servers; inside a region nothing is rounded. A model that comes whole is exact."""

    def __init__(self, up: CodecName, down: CodecName) -> None:
        self.codecs = Codecs(up=up, differences=down)
        self.roundings = Roundings(
            push=partial(arrives, codec=up) if up != "fp32" else None,
            difference=partial(arrives, codec=down) if down != "fp32" else None,
        )

    def __call__(self, _sender: NodeId, _to: NodeId, message: Message) -> Message:
        codec = self.codecs.of(message)
        if codec == "fp32" or not isinstance(message, Push | PushAnswer):
            return message
        assert isinstance(message.payload, Fragments)
        came = Fragments([arrives(t, codec) for t in message.payload.tensors])
        return replace(message, payload=came)
