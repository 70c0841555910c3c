"""What travels beside the core's messages: greetings, manifests, chunks, offers.

Plain data; :mod:`halos.wire.serde` turns it into protobuf and back. A message that carries tensors
travels without them (its payload is ``NOTHING``), beside a :class:`Manifest` of what will come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from halos.core.messages import Assignment, Message, Push, PushAnswer, WorkerUpdate

CHUNK_BYTES = 1 << 20
ALIGNMENT = 4096  # elements; chunks begin and end at multiples of it
OLDEST_PROTOCOL = 1
NEWEST_PROTOCOL = 1

CodecName = Literal[
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int2",
    "topk",
    "int8+zstd",
    "int4+zstd",
    "int2+zstd",
    "topk+zstd",
]
PeerRole = Literal["worker", "server", "observer"]


@dataclass(frozen=True, slots=True)
class Codecs:
    """In which codecs tensors travel: between workers and their server, and between servers.

    ``up``: pushes. ``models``: whole models, to servers. ``differences``: between models, to
    servers that hold one; ``None``: all come whole.
    """

    workers: CodecName = "fp32"
    up: CodecName = "fp32"
    models: CodecName = "fp32"
    differences: CodecName | None = None

    def of(self, message: Message) -> CodecName:
        """That of the tensors of a message."""
        match message:
            case WorkerUpdate() | Assignment():
                return self.workers
            case Push():
                return self.up
            case PushAnswer(against=int()):
                return self.differences or self.models
            case _:
                return self.models


class Channel(Enum):
    """Which of a process's two nodes is meant."""

    NODE = 0  # worker or server
    SESSION = 1  # session at the child's end, membership at the parent's


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One logical parameter or constant, as in ``halos.core.fragments.Parameter``."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayoutShape:
    """A ``ModelLayout`` as it travels; needs no torch."""

    parameters: tuple[ParameterShape, ...]
    constants: tuple[ParameterShape, ...]
    hash: str


@dataclass(frozen=True, slots=True)
class FragmentHeader:
    elements: int
    codec: CodecName


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a payload consists of. ``content`` names these very bytes, at random."""

    content: bytes
    fragments: tuple[FragmentHeader, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """The first ``elements`` of a fragment are here already."""

    fragment: int
    elements: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` elements of a fragment from ``offset`` on, encoded. ``crc32`` is of ``data``.

    ``data`` may be a view of other memory, such as the payload's: use it up or serialise it before
    that is let go of.
    """

    fragment: int
    offset: int
    count: int
    crc32: int
    data: bytes | bytearray | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a set of fragments lies. Empty ``address``: the server that said so."""

    address: str = ""
    first_fragment: int = 0
    fragments: int = 0  # 0: all from the first on


# ---------------------------------------------------------------- greeting


@dataclass(frozen=True, slots=True)
class Hello:
    role: PeerRole
    name: str = ""  # wanted; empty: the server chooses
    instance: bytes = b""  # of this start of the process
    run: str = ""  # expected; empty: any
    oldest_protocol: int = OLDEST_PROTOCOL
    newest_protocol: int = NEWEST_PROTOCOL
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """``samples`` over the whole run; ``None``: no end."""

    identity: str
    samples: int | None


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a server answers to :class:`Hello`: all that the run's members agree on."""

    protocol: int
    features: tuple[str, ...]
    run: str
    specification_version: int
    specification: str = field(repr=False)  # JSON
    layout: LayoutShape = field(repr=False)
    datasets: tuple[DatasetShape, ...]
    server: str  # the node that answers
    name: str  # the child's own


# ---------------------------------------------------------------- talk


@dataclass(frozen=True, slots=True)
class Said:
    """A message without tensors, either way."""

    channel: Channel
    message: Message


@dataclass(frozen=True, slots=True)
class Hold:
    """The first frame of a child's stream: who talks."""

    name: str
    instance: bytes


@dataclass(frozen=True, slots=True)
class Fetched:
    """This transfer is here; it need not be kept."""

    transfer: bytes


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a process and those below it are doing, as JSON."""

    status: str


@dataclass(frozen=True, slots=True)
class Offer:
    """A message to a child node whose tensors wait to be fetched."""

    message: Message
    transfer: bytes
    manifest: Manifest
    endpoints: tuple[Endpoint, ...] = (Endpoint(),)


ChildFrame = Hold | Said | Fetched | Telemetry
ParentFrame = Said | Offer

# ---------------------------------------------------------------- moving tensors


@dataclass(frozen=True, slots=True)
class Header:
    run: str
    protocol: int
    specification_version: int
    sender: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Announces a ``WorkerUpdate`` or a ``Push`` in ``parts`` streams.

    As the first frame of an upload: one that comes whole in that stream, and needs no commit.
    """

    header: Header
    message: Message
    manifest: Manifest
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Begun:
    transfer: bytes
    received: tuple[Progress, ...] = ()
    endpoints: tuple[Endpoint, ...] = (Endpoint(),)


@dataclass(frozen=True, slots=True)
class Part:
    """The first frame of an upload of what was announced before; chunks follow."""

    transfer: bytes
    part: int


UploadFrame = Begin | Part | Chunk


@dataclass(frozen=True, slots=True)
class Uploaded:
    elements: int


@dataclass(frozen=True, slots=True)
class Commit:
    transfer: bytes


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for the chunks of an offered transfer, but for what is ``received``."""

    transfer: bytes
    received: tuple[Progress, ...] = ()


# ---------------------------------------------------------------- control


@dataclass(frozen=True, slots=True)
class Observe:
    """Wants a model newer than version ``after``; waits for one when ``wait``."""

    after: int | None = None
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """``transfer`` is ``None`` when the run is over and nothing newer came."""

    version: int
    local_steps: int
    tokens: int
    elapsed_s: float
    finished: bool
    transfer: bytes | None = None
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``loss`` in nats a token, over ``samples`` of the validation set; 0: all of it."""

    version: int
    local_steps: int
    tokens: int
    elapsed_s: float
    loss: float
    samples: int
