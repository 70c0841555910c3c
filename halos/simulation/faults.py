"""Deaths, departures and outages of an environment, in order of time, and a clock run through them.

What fails at random is drawn lazily and from its key alone: a longer run sees the same faults.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from halos.core.membership import Session, session_of
from halos.core.messages import Leave, NodeId, Received
from halos.core.topology import Topology
from halos.runtime.plan import RunPlan
from halos.runtime.virtual import VirtualClock
from halos.simulation.chance import uniforms
from halos.simulation.circumstances import FaultKind, Outage, named
from halos.simulation.environment import Environment

EVENTS_A_TICK = 256


@dataclass(frozen=True, slots=True)
class Fault:
    """``who``: a worker or a server; for "cut" and "mend" the lower end of the link."""

    at_s: float
    kind: FaultKind
    who: NodeId


def faults_of(environment: Environment, topology: Topology, seed: int) -> Iterator[Fault]:
    """All that happens to the processes of ``topology``, without end if anything fails at random.

    At one time, what the environment names first comes first. Where workers are attached to the
    root, a region has no server, and its link is that of each of its workers.
    """
    present = {s.name for s in topology.servers} | {w.name for w in topology.workers}
    streams = [iter(_planned(environment))]
    streams += [
        _again_and_again(outage, who, (seed, index))
        for index, outage in enumerate(environment.outages)
        for who in named(outage.who, environment.places(outage.kind))
    ]
    for fault in heapq.merge(*streams, key=lambda fault: fault.at_s):
        if fault.who in present:
            yield fault
        elif fault.kind in ("cut", "mend"):
            for worker in named(f"{fault.who}/*", environment.workers):
                yield replace(fault, who=worker)


def _planned(environment: Environment) -> list[Fault]:
    """What happens at given times; who joins later has left before the start."""
    faults = [
        Fault(event.at_s, event.kind, who)
        for event in environment.events
        for who in named(event.who, environment.places(event.kind))
    ]
    faults.sort(key=lambda fault: fault.at_s)
    first: dict[NodeId, str] = {}
    for fault in faults:
        if fault.kind in ("join", "leave"):
            first.setdefault(fault.who, fault.kind)
    absent = [Fault(0.0, "leave", who) for who, kind in first.items() if kind == "join"]
    return absent + faults


def _again_and_again(outage: Outage, who: NodeId, key: tuple[int, int]) -> Iterator[Fault]:
    now, over = 0.0, _over(outage.kind)
    for nth in count():
        until, lasting = uniforms(*key, who, nth)
        now -= outage.every_s * math.log(until)
        yield Fault(now, outage.kind, who)
        now += outage.lasting_s * (1.0 if outage.fixed else -math.log(lasting))
        yield Fault(now, over, who)


def _over(kind: FaultKind) -> FaultKind:
    return "return" if kind == "kill" else "mend"


def nothing(process: NodeId) -> None:
    """What is done at a worker's end by those to whom it means nothing."""


@dataclass
class FaultyRun:
    """Drives a started clock through faults.

    ``ended`` hears of a worker whose process has ended, and ``reborn`` of one that is about to
    start again, with nothing of what it knew: so its trainer is to start afresh, too.
    A local server that returns has a fresh state as well, and gets the model from its parent.
    """

    clock: VirtualClock
    plan: RunPlan
    topology: Topology
    ended: Callable[[NodeId], None] = nothing
    reborn: Callable[[NodeId], None] = nothing

    def __post_init__(self) -> None:
        self._servers = {place.name: place for place in self.topology.servers}
        self._workers = {place.name: place for place in self.topology.workers}
        self._dead: set[NodeId] = set()
        self._left: set[NodeId] = set()
        self._cut: set[NodeId] = set()

    def run(
        self,
        faults: Iterable[Fault],
        *,
        until: float | None = None,
        tick: Callable[[], bool] | None = None,
    ) -> bool:
        """To the end of the run, or until a time; returns whether the run is over.

        ``tick`` is called every some events, and says whether to go on.
        """
        for fault in faults:
            if until is not None and fault.at_s > until:
                break
            if not self._run_to(fault.at_s, tick):
                return self.clock.finished
            self.suffer(fault)
        self._run_to(until, tick)
        return self.clock.finished

    def suffer(self, fault: Fault) -> None:
        """Now. What has happened already is not done again."""
        who = fault.who
        match fault.kind:
            case "kill" if self._is_there(who):
                self._dead.add(who)
                self._end(who)
            case "return" if who in self._dead:
                self._dead.remove(who)
                self._start(who)
            case "leave" if who not in self._left:
                if who not in self._dead:
                    self._say_goodbye(who)
                    self._end(who)
                self._dead.discard(who)
                self._left.add(who)
            case "join" if who in self._left:
                self._left.remove(who)
                self._start(who)
            case "cut" if who not in self._cut:
                self._cut.add(who)
                self.clock.cut_link(who)
            case "mend" if who in self._cut:
                self._cut.remove(who)
                self.clock.mend_link(who)

    def _is_there(self, who: NodeId) -> bool:
        return who not in self._dead and who not in self._left

    def _run_to(self, time: float | None, tick: Callable[[], bool] | None) -> bool:
        """Whether to go on: the run is not over, and nobody stopped it."""
        clock, limit = self.clock, math.inf if time is None else time
        while not clock.finished and not clock.stopping.is_set():
            if tick is not None and not tick():
                return False
            if clock.next_at > limit or clock.next_at == math.inf:
                clock.run(until=time)  # so that this time is also the clock's
                return True
            clock.run(until=time, events=EVENTS_A_TICK)
        return False

    def _start(self, who: NodeId) -> None:
        if who in self._workers:
            self.reborn(who)
            self.clock.revive(self.plan.worker_nodes(self._workers[who]))
        else:
            self.clock.revive(self.plan.server_nodes(self._servers[who]))

    def _end(self, who: NodeId) -> None:
        self.clock.kill(who)
        if who in self._workers:
            self.ended(who)

    def _say_goodbye(self, worker: NodeId) -> None:
        """The server has the lease for another at once, if the worker is in touch with it."""
        session = self.clock.nodes.get(session_of(worker))
        if isinstance(session, Session) and session.state.fence is not None:
            goodbye = Received(session_of(worker), Leave(session.state.fence))
            self.clock.dispatch(session.membership, goodbye, self.clock.now)
