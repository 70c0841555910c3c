"""What all drivers in one process share: feed events to nodes and carry out their effects."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable

from halos.core.frozen import frozen
from halos.core.messages import (
    Effect,
    Event,
    Finish,
    LinkLost,
    LocalStepsDone,
    Message,
    Node,
    NodeId,
    Received,
    Refused,
    Reject,
    RunLocalSteps,
    Send,
    Started,
    Tell,
    Told,
)
from halos.core.topology import ROOT
from halos.wire.roundtrip import RoundTrip

Trainer = Callable[[RunLocalSteps], LocalStepsDone]
Carry = Callable[[NodeId, NodeId, Message], Message]  # from a sender, to a receiver


@frozen
class RoundEnds:
    """Stands for the result of a round that is being trained, or will be."""

    job: RunLocalSteps


@frozen
class Pending:
    """An event that has not been handled. In order of time, then sequence."""

    time: float
    sequence: int
    node: NodeId
    event: Event | RoundEnds


@frozen
class Step:
    """One event handled by one node, as observers and traces see it."""

    time: float
    node: NodeId
    event: Event
    effects: list[Effect]
    subject: Node


Observer = Callable[[Step], None]


class Dispatcher(ABC):
    """Owns the nodes of a run. Subclasses own the clock: ``run`` feeds events until the root ends.

    ``isolate``: what every message goes through on its way; ``None`` hands it over as it is. What
    differs from link to link is set as ``carry`` in its place.
    """

    def __init__(
        self,
        nodes: dict[NodeId, Node],
        trainers: dict[NodeId, Trainer],
        *,
        isolate: RoundTrip | None,
    ) -> None:
        self.nodes = nodes
        self.trainers = trainers
        self.carry: Carry | None = None
        if isolate is not None:
            self.carry = lambda _sender, _to, message: isolate(message)
        self.observers: list[Observer] = []
        self.refusals: Counter[str] = Counter()
        self.finished = False
        self.stopping = threading.Event()
        self._cut: set[NodeId] = set()  # processes whose link to the parent is down
        self._epoch = 0  # starts so far: no process starts twice under the same

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds on the run's clock."""

    @abstractmethod
    def under_way(self) -> list[Pending]:
        """All that has not been handled: messages, notices, rounds in training."""

    @abstractmethod
    def restore(self, pending: list[Pending]) -> None:
        """Continue where :meth:`under_way` was asked, in place of :meth:`start`."""

    @abstractmethod
    def _post(self, delay_s: float, node: NodeId, event: Event) -> None:
        """Have ``event`` handled by ``node`` after ``delay_s``."""

    @abstractmethod
    def _train(self, worker: NodeId, job: RunLocalSteps) -> None:
        """Have the worker's trainer do ``job``, then post its result."""

    @abstractmethod
    def _abandon(self, worker: NodeId) -> None:
        """Forget what ``worker`` was training."""

    def stop(self) -> None:
        """Have ``run`` return soon, with everything in a state that can be captured.

        Safe in a signal handler and from any thread; rounds in training see ``stopping``.
        """
        self.stopping.set()

    def start(self, names: Iterable[NodeId] | None = None) -> None:
        """Post the first event of these nodes, by default of all."""
        for name in list(names if names is not None else self.nodes):
            self._post(0.0, name, Started(self._epoch))
        self._epoch += 1

    def dispatch(self, name: NodeId, event: Event, now: float) -> None:
        """Let one node handle one event and carry out what it asks for."""
        node = self.nodes.get(name)
        if node is None:
            return
        effects = node.handle(event, now=now)
        if self.observers:
            step = Step(now, name, event, effects, node)
            for observe in self.observers:  # before anybody hears of it: a trace lacks no cause
                observe(step)
        for effect in effects:
            if isinstance(effect, Send):  # most are, and the others nearly all rounds
                self._send(name, effect.to, effect.message)
            elif isinstance(effect, RunLocalSteps):
                self._train(name, effect)
            else:
                self._carry_out(name, effect)

    def _carry_out(self, name: NodeId, effect: Tell | Reject | Finish) -> None:
        match effect:
            case Tell(to, notice):
                self._post(0.0, to, Told(notice))
            case Reject(to, reason, key, fence, detail):
                self.refusals[reason] += 1
                self._send(name, to, Refused(reason, key, fence, detail))
            case Finish():
                self.finished = self.finished or name == ROOT

    def _send(self, sender: NodeId, to: NodeId, message: Message) -> None:
        if to not in self.nodes or (self._cut and self._is_cut(sender, to)):
            return
        if self.carry is not None:
            message = self.carry(sender, to, message)
        self._deliver(sender, to, message)

    def _deliver(self, sender: NodeId, to: NodeId, message: Message) -> None:
        """Have a message received that nothing holds back."""
        self._post(0.0, to, Received(sender, message))

    # ------------------------------------------------------------ faults

    def cut_link(self, child: NodeId) -> None:
        """Drop all between ``child`` and its parent from now on."""
        self._cut.add(child)
        self._post(0.0, f"{child}.session", LinkLost())

    def mend_link(self, child: NodeId) -> None:
        self._cut.discard(child)

    def kill(self, process: NodeId) -> None:
        """A worker's or server's process ends without a word."""
        for name in [n for n in self.nodes if n.partition(".")[0] == process]:
            del self.nodes[name]
        self._abandon(process)

    def revive(self, nodes: dict[NodeId, Node]) -> None:
        """A process starts (again)."""
        self.nodes |= nodes
        self.start(nodes)

    def _is_cut(self, sender: NodeId, to: NodeId) -> bool:
        a, b = sender.partition(".")[0], to.partition(".")[0]
        return a != b and any(self._parent(x) == y for x, y in ((a, b), (b, a)) if x in self._cut)

    def _parent(self, process: NodeId) -> NodeId | None:
        parent: NodeId | None = getattr(self.nodes.get(process), "parent", None)
        return parent
