"""The whole state of a run between two events, as JSON values and tensors, and back again.

Taking it copies no server's tensors and stops no worker: what is captured is immutable, and a
round in training is kept as the order to train it (DESIGN 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cattrs.strategies import configure_tagged_union
from torch import Tensor

from halos.core.equations import OuterSettings
from halos.core.messages import Event, Node, NodeId
from halos.core.server import Server
from halos.core.state import EXACT, Roundings, TorchState
from halos.core.tensors import Payload
from halos.runtime.dispatcher import Dispatcher, Pending, RoundEnds
from halos.store.encoding import PayloadReader, TensorTable, decoder, encoder


class WorkerTensors(Protocol):
    """What a worker keeps between rounds."""

    def capture(self, *, before: str | None) -> dict[str, Tensor]:
        """As of now, or of before the lease that is in training or has just been trained."""
        ...

    def restore(self, tensors: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Capture:
    """Ready to be written; ``manifest`` refers to ``tensors`` by key.

    ``held`` keeps what is captured from being written to for as long as this exists.
    """

    manifest: dict[str, Any]
    tensors: dict[str, Tensor]
    held: Sequence[Payload] = ()


def capture(
    driver: Dispatcher,
    sequence: int,
    workers: Mapping[NodeId, WorkerTensors],
    nodes: Mapping[NodeId, Node] | None = None,
) -> Capture:
    """All of a run, or these of its ``nodes``.

    Call it between two events, in the thread that handles them.
    """
    nodes = driver.nodes if nodes is None else nodes
    table = TensorTable()
    encode = encoder(table)
    configure_tagged_union(Event | RoundEnds, encode, tag_name="type")
    under_way = driver.under_way()
    training = {p.node: p.event.job.lease.id for p in under_way if isinstance(p.event, RoundEnds)}
    manifest = {
        "now": driver.now,
        "finished": driver.finished,
        "sequence": sequence,
        "nodes": {name: encode.unstructure(_state(node)) for name, node in nodes.items()},
        "servers": {
            name: {
                "step": node.tensors.step,
                "parts": {k: table.add_payload(v) for k, v in node.tensors.capture().items()},
            }
            for name, node in nodes.items()
            if isinstance(node, Server) and isinstance(node.tensors, TorchState)
        },
        "workers": {
            name: {
                key: table.add(tensor)
                for key, tensor in worker.capture(before=training.get(name)).items()
            }
            for name, worker in workers.items()
        },
        "under_way": encode.unstructure(under_way, unstructure_as=list[Pending]),
    }
    return Capture(manifest, table.tensors, table.payloads)


class Restored:
    """What a capture holds, as objects again. Payloads that were one object are one again."""

    def __init__(self, saved: Capture) -> None:
        self._manifest = saved.manifest
        self._tensors = saved.tensors
        self._payloads = PayloadReader(saved.tensors)
        self._decode = decoder(self._payloads)
        configure_tagged_union(Event | RoundEnds, self._decode, tag_name="type")

    @property
    def finished(self) -> bool:
        return bool(self._manifest["finished"])

    def node_states(self, nodes: Mapping[NodeId, Node]) -> dict[NodeId, Any]:
        """The saved state of each of ``nodes``, which serve as examples of their kinds."""
        saved = self._manifest["nodes"]
        return {
            name: self._decode.structure(saved[name], type(_state(node)))
            for name, node in nodes.items()
        }

    def server_tensors(
        self, server: NodeId, settings: OuterSettings, links: Roundings = EXACT
    ) -> TorchState:
        saved = self._manifest["servers"][server]
        parts = {name: self._payloads.fragments(keys) for name, keys in saved["parts"].items()}
        return TorchState.restore(parts, settings, links, step=saved["step"])

    def worker_tensors(self, worker: NodeId) -> dict[str, Tensor]:
        saved = self._manifest["workers"][worker]
        return {name: self._tensors[key] for name, key in saved.items()}

    def under_way(self) -> list[Pending]:
        saved = self._manifest["under_way"]
        pending: list[Pending] = self._decode.structure(saved, list[Pending])
        return pending


def _state(node: Node) -> Any:
    return node.state  # type: ignore[attr-defined]
