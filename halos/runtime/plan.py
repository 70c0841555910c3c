"""The nodes that a run consists of, and what they all agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halos.core.leasing import LeasingState
from halos.core.ledger import Ledger, sections_for
from halos.core.membership import (
    Identity,
    Membership,
    MembershipSettings,
    Session,
    membership_of,
    session_of,
)
from halos.core.messages import Join, Node, NodeId, Role
from halos.core.server import Server, ServerSettings, ServerState
from halos.core.tensors import TensorState
from halos.core.topology import ServerPlace, Topology, WorkerPlace
from halos.core.worker import Worker


@dataclass(frozen=True)
class RunPlan:
    """What all nodes of one run agree on. ``samples``: of each data set; ``None`` is no end.

    ``apart``: the nodes are in processes of their own, and only the root's has the first model;
    it sends that to every other.
    """

    topology: Topology
    identity: Identity
    membership: MembershipSettings
    samples: Mapping[str, int | None]
    server_settings: Callable[[NodeId], ServerSettings]
    tensors: Callable[[NodeId], TensorState]
    apart: bool = False

    def nodes(self, states: Mapping[NodeId, Any] | None = None) -> dict[NodeId, Node]:
        """All nodes of the run, in the order in which they are to be started.

        ``states`` holds each node's saved state; without it the run is at its start.
        """
        nodes: dict[NodeId, Node] = {}
        for server in self.topology.servers:
            nodes |= self.server_nodes(server, states)
        for worker in self.topology.workers:
            nodes |= self.worker_nodes(worker, states)
        return nodes

    def server_nodes(
        self, place: ServerPlace, states: Mapping[NodeId, Any] | None = None
    ) -> dict[NodeId, Node]:
        """A server, its membership and, unless it is the root, its session with the parent."""
        name, parent = place.name, place.parent
        saved = states or {}
        state = saved.get(name) or self._first_state(parent)
        nodes: dict[NodeId, Node] = {
            name: Server(
                name,
                self.server_settings(name),
                self.tensors(name),
                parent,
                state,
            ),
            membership_of(name): Membership(
                name, self.identity, self.membership, saved.get(membership_of(name))
            ),
        }
        if parent is not None:
            nodes |= self._session(name, parent, "server", saved)
        return nodes

    def worker_nodes(
        self, place: WorkerPlace, states: Mapping[NodeId, Any] | None = None
    ) -> dict[NodeId, Node]:
        saved = states or {}
        worker = Worker(place.name, place.parent, saved.get(place.name))
        return {place.name: worker, **self._session(place.name, place.parent, "worker", saved)}

    def _first_state(self, parent: NodeId | None) -> ServerState:
        if parent is not None:
            return ServerState(pristine=not self.apart)
        ledger = Ledger(sections=sections_for(dict(self.samples)))
        return ServerState(leasing=LeasingState(ledger=ledger), ready=True, pristine=not self.apart)

    def _session(
        self, name: NodeId, parent: NodeId, role: Role, saved: Mapping[NodeId, Any]
    ) -> dict[NodeId, Node]:
        join = Join(
            role=role,
            run=self.identity.run,
            model=self.identity.model,
            datasets=self.identity.datasets,
        )
        session = session_of(name)
        return {session: Session(name, parent, join, self.membership, saved.get(session))}
