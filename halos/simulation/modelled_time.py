"""How long computing and sending take in an environment, and what sending weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from halos.core.membership import membership_of, session_of
from halos.core.messages import (
    Assignment,
    Message,
    NodeId,
    Push,
    PushAnswer,
    Resumed,
    WorkerUpdate,
)
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.runtime.timing import UniformTime
from halos.simulation.circumstances import named
from halos.simulation.pace import Pace

if TYPE_CHECKING:
    from halos.simulation.environment import Environment

Link = tuple[int, int]  # from the region of this index to that of that


class EnvironmentModel(UniformTime):
    """How long things take in an environment, for the nodes of one topology.

    ``up_ratio`` and ``down_ratio``: what pushes and the models that answer them weigh, as shares of
    a model; a link that compresses has less than 1. A model sent whole after a reset weighs 1.
    ``seed``: of the speeds that vary.
    """

    def __init__(
        self,
        environment: Environment,
        topology: Topology,
        *,
        seed: int = 0,
        up_ratio: float = 1.0,
        down_ratio: float = 1.0,
    ) -> None:
        super().__init__(topology, step_s=environment.step_ms / 1e3)
        self._site = _sites(environment, topology)
        self._paces = _paces(environment, topology, seed)
        links = self._links(topology)
        self._latency_s = {link: environment.latency_s(*link) for link in links}
        whole, up, down = (
            _Bulk.of(environment, ratio, self._latency_s) for ratio in (1.0, up_ratio, down_ratio)
        )
        self._whole = whole
        self._bulk: dict[type, _Bulk] = {
            WorkerUpdate: whole,
            Assignment: whole,
            Push: up,
            PushAnswer: down,
            Resumed: down,
        }

    def transfer_s(self, sender: NodeId, to: NodeId, message: Message) -> float:
        """From a child to its parent or back."""
        bulk = self._bulk_of(message)
        seconds = self._latency_s if bulk is None else bulk.seconds
        site = self._site
        return seconds[site[sender], site[to]]

    def compute_s(self, worker: NodeId, local_steps: int, now: float) -> float:
        work_s = self._step_s[worker] * local_steps
        if worker in self._paces:
            work_s = self._paces[worker].seconds(work_s, now)
        return work_s + self._tie_s[worker]

    def size_bytes(self, sender: NodeId, to: NodeId, message: Message) -> int:
        """What a message weighs on the links between regions: 0 within one, or if it is small."""
        site = self._site
        if site[sender] == site[to]:
            return 0
        bulk = self._bulk_of(message)
        return 0 if bulk is None else bulk.bytes

    def _bulk_of(self, message: Message) -> _Bulk | None:
        if isinstance(message, Resumed) and (message.payload is None or message.reset):
            return None if message.payload is None else self._whole
        return self._bulk.get(type(message))

    def _links(self, topology: Topology) -> list[Link]:
        links: dict[Link, None] = {}
        for place in _below_root(topology):
            assert place.parent is not None
            here, there = self._site[place.name], self._site[place.parent]
            links |= {(here, there): None, (there, here): None}
        return list(links)


@dataclass(frozen=True, slots=True)
class _Bulk:
    """One kind of payload: its weight, and the seconds that each link takes for it."""

    bytes: int
    seconds: dict[Link, float]

    @classmethod
    def of(cls, environment: Environment, ratio: float, latency_s: dict[Link, float]) -> _Bulk:
        rates = environment.bandwidth_gbps
        size = round(environment.model_bytes * ratio)
        trips = 1 + 2 * environment.round_trips
        seconds = {(a, b): s * trips if a != b else s for (a, b), s in latency_s.items()}
        if rates is not None:
            for a, b in seconds:
                seconds[a, b] += size * 8 / (rates[a][b] * 1e9)
        return cls(size, seconds)


def _below_root(topology: Topology) -> tuple[ServerPlace | WorkerPlace, ...]:
    return (*topology.servers[1:], *topology.workers)


def _sites(environment: Environment, topology: Topology) -> dict[NodeId, int]:
    """The region that each node is in: what is not named after one is where its parent is."""
    region = {r.name: i for i, r in enumerate(environment.regions)}
    site: dict[NodeId, int] = {ROOT: region[environment.root_region]}
    for place in _below_root(topology):
        home = place.name.rpartition("/")[0] or place.name
        assert place.parent is not None
        site[place.name] = region[home] if home in region else site[place.parent]
    # A session or membership is in the process of its worker or server.
    return {
        node: here
        for name, here in site.items()
        for node in (name, session_of(name), membership_of(name))
    }


def _paces(environment: Environment, topology: Topology, seed: int) -> dict[NodeId, Pace]:
    names = [worker.name for worker in topology.workers]
    paces = {}
    for name in names if environment.variations else ():
        variations = [v for v in environment.variations if named(v.who, [name])]
        if variations:
            paces[name] = Pace.of(name, variations, seed)
    return paces
