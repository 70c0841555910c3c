"""Nodes under test, the messages to feed them, and what they answered, by kind."""

from __future__ import annotations

from typing import TypeVar

import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.leasing import LeasingSettings, LeasingState
from halos.core.ledger import Ledger, sections_for
from halos.core.messages import (
    Assignment,
    BlockRequest,
    Effect,
    Grant,
    Joined,
    MemberJoined,
    Message,
    Node,
    NodeId,
    Notice,
    Push,
    Ready,
    Received,
    Resume,
    Resumed,
    Send,
    Told,
    WorkerUpdate,
)
from halos.core.samples import Block, Report
from halos.core.server import Server, ServerSettings, ServerState
from halos.core.state import TorchState
from halos.core.tensors import NullState, Payload, TensorState

T = TypeVar("T")
PLAIN = OuterSettings(rate=1.0)  # theta -= g


# ---------------------------------------------------------------- tensors


def fragments(*values: float) -> Fragments:
    """One fragment of these numbers, in float64: closed forms hold to the last digits."""
    return Fragments([torch.tensor(values, dtype=torch.float64)])


def values(payload: Payload) -> list[float]:
    assert isinstance(payload, Fragments)
    return [x for tensor in payload.tensors for x in tensor.tolist()]


def torch_state(*theta: float, outer: OuterSettings = PLAIN, parent: bool = False) -> TorchState:
    return TorchState.start(fragments(*theta), outer, has_parent=parent)


# ---------------------------------------------------------------- servers


def settings_of(**given: object) -> ServerSettings:
    """Server settings; those of leasing may be named among them. A round is 4 steps of 1 sample."""
    leasing = {"batch_size": 1, "local_steps": 4}
    leasing |= {k: given.pop(k) for k in list(given) if k in LeasingSettings.model_fields}
    return ServerSettings.model_validate({"leasing": leasing, **given})


def root_server(
    samples: int | dict[str, int | None] | None = 1000,
    *,
    tensors: TensorState | None = None,
    **settings: object,
) -> Server:
    counts = samples if isinstance(samples, dict) else {"text": samples}
    state = ServerState(
        leasing=LeasingState(ledger=Ledger(sections=sections_for(counts))), ready=True
    )
    return Server("root", settings_of(**settings), tensors or NullState(), None, state)


def region_server(*, tensors: TensorState | None = None, **settings: object) -> Server:
    """A region that still has to meet its parent: see :func:`meet_parent`."""
    return Server("eu", settings_of(**settings), tensors or NullState(), "root")


# ---------------------------------------------------------------- events in


def receive(node: Node, sender: NodeId, message: Message, *, now: float = 0.0) -> list[Effect]:
    return node.handle(Received(sender, message), now=now)


def tell(node: Node, notice: Notice, *, now: float = 0.0) -> list[Effect]:
    return node.handle(Told(notice), now=now)


def join_worker(
    server: Server,
    name: NodeId = "w0",
    *,
    fence: int = 1,
    datasets: tuple[str, ...] = ("text",),
    lease: str | None = None,
    now: float = 0.0,
) -> list[Effect]:
    """Let a worker in that still trains on ``lease``; what the server answers."""
    tell(server, MemberJoined(name, "worker", fence, datasets), now=now)
    return receive(server, name, Ready(fence, lease), now=now)


def join_region(
    server: Server,
    name: NodeId = "eu",
    *,
    fence: int = 1,
    datasets: tuple[str, ...] = ("text",),
    tenure: int = 0,
    sequence: int = 0,
    in_flight: bool = False,
    base_version: int = 0,
    granted: int = 0,
    pushed_under: int = 1,
    now: float = 0.0,
) -> list[Effect]:
    """Let a child server in; by default one with nothing to continue."""
    tell(server, MemberJoined(name, "server", fence, datasets), now=now)
    resume = Resume(fence, tenure, sequence, in_flight, base_version, granted, pushed_under)
    return receive(server, name, resume, now=now)


def meet_parent(
    region: Server,
    *,
    fence: int = 1,
    tenure: int = 1,
    sequence: int = 0,
    reset: bool = True,
    version: int = 0,
    payload: Payload | None = None,
    now: float = 0.0,
) -> list[Effect]:
    """The parent lets the region in; by default for the first time, with the model it has."""
    tell(region, Joined(fence), now=now)
    resumed = Resumed(fence, tenure, sequence, reset, version, payload)
    return receive(region, "root", resumed, now=now)


def give_samples(
    region: Server, start: int, end: int, *, progress: int | None = None, now: float = 0.0
) -> list[Effect]:
    """Grant the region's open request these samples."""
    request = region.state.leasing.request
    assert request is not None and region.state.fence is not None
    block = Block("text", 0, start, end, start if progress is None else progress)
    grant = Grant(region.state.fence, request.number, (block,))
    return receive(region, "root", grant, now=now)


def working_region(
    samples: int = 1000, *, tensors: TensorState | None = None, workers: int = 1, **settings: object
) -> tuple[Server, list[Assignment]]:
    """A region of the root that has samples in stock and workers on their first leases."""
    region = region_server(tensors=tensors, **settings)
    meet_parent(region)
    assignments: list[Assignment] = []
    for i in range(workers):
        effects = join_worker(region, f"w{i}", fence=i + 1)
        if i == 0:
            effects = give_samples(region, 0, samples)
        assignments.append(only(effects, Assignment))
    return region, assignments


# ---------------------------------------------------------------- messages


def finished(assignment: Assignment, *g: float, **changes: object) -> WorkerUpdate:
    """The update that finishes an assignment, with this pseudo-gradient."""
    given: dict[str, object] = {
        "lease": assignment.lease.id,
        "fence": assignment.fence,
        "base_version": assignment.version,
        "local_steps": assignment.local_steps,
        "tokens": 10 * assignment.lease.samples,
        "loss": 2.0,
        "norm": 1.0,
        "seconds": 1.0,
        "payload": fragments(*g) if g else assignment.payload,
    }
    return WorkerUpdate(**{**given, **changes})  # type: ignore[arg-type]


def push_of(
    sequence: int,
    *u: float,
    fence: int = 1,
    base_version: int = 0,
    payload: Payload | None = None,
    **report: object,
) -> Push:
    """A region's push of ``u``; the rest are fields of its report."""
    return Push(sequence, fence, base_version, Report(**report), payload or fragments(*u))  # type: ignore[arg-type]


def request_of(number: int, need: int, want: int | None = None, *, fence: int = 1) -> BlockRequest:
    return BlockRequest(fence, number, need, need if want is None else want)


# ---------------------------------------------------------------- effects out


def found(effects: list[Effect], kind: type[T], to: NodeId | None = None) -> list[T]:
    """Effects of a kind, or messages and notices of it that are sent, in order."""
    result: list[T] = []
    for effect in effects:
        receiver = getattr(effect, "to", None)
        content = getattr(effect, "message", getattr(effect, "notice", effect))
        result += [x for x in (content,) if isinstance(x, kind) and to in (None, receiver)]
    return result


def only(effects: list[Effect], kind: type[T], to: NodeId | None = None) -> T:
    """The one thing of its kind among these effects."""
    matching = found(effects, kind, to)
    assert len(matching) == 1, f"not one {kind.__name__} in {effects}"
    return matching[0]


def sent(effects: list[Effect], kind: type[T]) -> dict[NodeId, T]:
    """Messages of a kind by receiver."""
    return {e.to: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}
