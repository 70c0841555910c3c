"""A run of real nodes in a network and among machines that do the worst they may.

Every rule of the state machine is a method here, so that a failing example can be written down as
a plain test. Each sample adds one to its own parameter, at rate 1 without momentum: the root's
parameters then tell which samples' changes arrived, and :meth:`World.check` compares that, and
everything else that must hold at any moment, after each step.

Of a network we ask only what every network gives: a lost message is noticed at some time by the
child's end (``LinkLost``) or by silence. It may reorder, repeat and delay without limit, over
restarts too. Within a process each node handles its events in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import torch

from halos.core.equations import OuterSettings
from halos.core.fragments import Fragments
from halos.core.leasing import LeasingSettings, LeasingState
from halos.core.ledger import Ledger, sections_for
from halos.core.membership import (
    Identity,
    Membership,
    MembershipSettings,
    Session,
    membership_of,
    session_of,
)
from halos.core.messages import (
    DeadlineReached,
    Effect,
    Event,
    Finish,
    Heartbeat,
    HeartbeatSeen,
    Join,
    LinkLost,
    LocalStepsDone,
    Message,
    Node,
    NodeId,
    RaiseFence,
    Received,
    Refused,
    Reject,
    Resume,
    Resumed,
    RunLocalSteps,
    Send,
    Started,
    Tell,
    Told,
)
from halos.core.samples import Range
from halos.core.server import Server, ServerSettings, ServerState
from halos.core.state import TorchState
from halos.core.worker import Worker

PLAIN = OuterSettings(rate=1.0)
MEMBERSHIP = MembershipSettings(heartbeat_interval_s=5, heartbeat_timeout_s=20, retry_s=2)
DRAIN_TIMEOUT_S = 60.0

# child -> parent; the root comes first and parents before their children
Tree = dict[NodeId, NodeId | None]
TWO_TIERS: Tree = {
    "root": None, "eu": "root", "us": "root", "eu/0": "eu", "eu/1": "eu", "us/0": "us"
}  # fmt: skip
THREE_TIERS: Tree = {
    "root": None, "eu": "root", "us": "root", "rack": "eu",
    "rack/0": "rack", "rack/1": "rack", "eu/0": "eu", "us/0": "us", "root/0": "root",
}  # fmt: skip


def process_of(node: NodeId) -> NodeId:
    return node.partition(".")[0]


@dataclass(frozen=True)
class Packet:
    sender: NodeId
    to: NodeId
    message: Message


@dataclass
class Saved:
    """States of one process's nodes, and the tensors of its server."""

    states: dict[NodeId, object]
    parts: dict[str, Fragments] = field(default_factory=dict)
    step: int = 0


class World:
    def __init__(
        self,
        tree: Tree = TWO_TIERS,
        *,
        samples: int | dict[str, int] = 24,
        without: dict[NodeId, str] | None = None,
        in_flight: str = "carry",
        lease_block: int | None = None,
        merge_weight: float = 0.5,
        accumulation: int = 2,
    ) -> None:
        self.tree = tree
        self.samples = samples if isinstance(samples, dict) else {"text": samples}
        self.total = sum(self.samples.values())
        self.without = without or {}  # processes that lack a data set, and so do those below them
        leasing = LeasingSettings(batch_size=1, local_steps=2, lease_block=lease_block)
        self.settings = ServerSettings(
            leasing=leasing,
            accumulation=accumulation,
            merge_weight=merge_weight,
            in_flight=in_flight,  # type: ignore[arg-type]
            drain_timeout_s=DRAIN_TIMEOUT_S,
        )
        self.workers = [n for n in tree if n not in tree.values()]
        self.servers = [n for n in tree if n in tree.values()]
        self.now = 0.0
        self.epoch = 0
        self.nodes: dict[NodeId, Node] = {}
        self.inbox: dict[NodeId, deque[Event]] = {}
        self.network: list[Packet] = []
        self.late: list[Packet] = []  # of which nothing is known until they arrive
        self.jobs: dict[NodeId, RunLocalSteps] = {}
        self.cut: dict[NodeId, bool] = {}  # links of these children; whether they lose messages
        self.unnoticed: list[NodeId] = []  # children whose link lost something
        self.frozen: set[NodeId] = set()
        self.saved: dict[NodeId, Saved] = {}
        self.memory_lost = False  # a server lost state, or was told to give it up
        self.highest: dict[NodeId, int] = {}
        self.touched: set[NodeId] = set()  # servers that something happened at since the last check
        for name in tree:
            self.start(name)
            self.save(name)

    # ------------------------------------------------------------ processes

    def nodes_of(self, name: NodeId) -> list[NodeId]:
        names = [name, membership_of(name), session_of(name)]
        return [n for n in names if n in self.nodes]

    def alive(self, name: NodeId) -> bool:
        return name in self.nodes

    def start(self, name: NodeId, saved: Saved | None = None) -> None:
        """A process begins, with nothing or where it was saved."""
        parent = self.tree[name]
        states = deepcopy(saved.states) if saved is not None else {}
        datasets = tuple(d for d in self.samples if d not in self._lacks(name))
        nodes: dict[NodeId, Node] = {}
        if name in self.workers:
            assert parent is not None
            nodes[name] = Worker(name, parent, states.get(name))  # type: ignore[arg-type]
        else:
            state = states.get(name)
            if state is None and parent is None:
                ledger = Ledger(sections=sections_for(dict(self.samples)))
                state = ServerState(leasing=LeasingState(ledger=ledger), ready=True)
            nodes[name] = Server(name, self.settings, self._tensors(name, saved), parent, state)  # type: ignore[arg-type]
            members = membership_of(name)
            identity = Identity(run="run", model="m", datasets=tuple(self.samples))
            nodes[members] = Membership(name, identity, MEMBERSHIP, states.get(members))  # type: ignore[arg-type]
        if parent is not None:
            join = Join("worker" if name in self.workers else "server", "run", "m", datasets)
            session = session_of(name)
            nodes[session] = Session(name, parent, join, MEMBERSHIP, states.get(session))  # type: ignore[arg-type]
        self.nodes |= nodes
        self.epoch += 1
        for node in nodes:
            self.inbox[node] = deque([Started(self.epoch)])
        self.highest.pop(name, None)
        self.touched.add(name)

    def _lacks(self, name: NodeId) -> set[str]:
        parent = self.tree[name]
        above = self._lacks(parent) if parent is not None else set()
        return above | ({self.without[name]} if name in self.without else set())

    def _tensors(self, name: NodeId, saved: Saved | None) -> TorchState:
        has_parent = self.tree[name] is not None
        if saved is None:
            model = Fragments([torch.zeros(self.total, dtype=torch.float64)])
            return TorchState.start(model, PLAIN, has_parent=has_parent)
        parts = {key: part.copy() for key, part in saved.parts.items()}
        return TorchState.restore(parts, PLAIN, step=saved.step)

    def save(self, name: NodeId) -> None:
        """Keep what the process knows. What its nodes have not handled yet is not part of it."""
        states = {n: deepcopy(self.nodes[n].state) for n in self.nodes_of(name)}  # type: ignore[attr-defined]
        self.saved[name] = Saved(states)
        node = self.nodes[name]
        if isinstance(node, Server):
            tensors = node.tensors
            assert isinstance(tensors, TorchState)
            parts = {key: part.copy() for key, part in tensors.capture().items()}
            self.saved[name] = Saved(states, parts, tensors.step)

    def kill(self, name: NodeId) -> None:
        """A process ends without a word; what it had not handled is gone."""
        for node in self.nodes_of(name):
            del self.nodes[node], self.inbox[node]
        self.jobs.pop(name, None)
        self.frozen.discard(name)
        self.touched.discard(name)
        if name in self.servers:
            self.memory_lost = True
        self.unnoticed += [child for child, parent in self.tree.items() if parent == name]

    def restart(self, name: NodeId, *, keep: bool) -> None:
        """The process comes back, with what was saved last or with nothing (never the root)."""
        if self.alive(name):
            if name == "root" and self.over("root"):
                return  # who restarts a run that is over does so with its end saved
            self.kill(name)
        self.start(name, self.saved[name] if keep or name == "root" else None)

    # ------------------------------------------------------------ network

    def child_end(self, a: NodeId, b: NodeId) -> NodeId:
        """Of two processes, the one that dials out to the other."""
        a, b = process_of(a), process_of(b)
        return a if self.tree[a] == b else b

    def deliverable(self) -> list[int]:
        return [
            i for i, p in enumerate(self.network) if self.child_end(p.sender, p.to) not in self.cut
        ]

    def one_of_a_kind(self, number: int) -> int | None:
        """One of the messages that may arrive; a rare kind is as likely as a frequent one."""
        indices = self.deliverable()
        kinds = sorted({type(self.network[i].message).__name__ for i in indices})
        if not kinds:
            return None
        kind = kinds[number % len(kinds)]
        alike = [i for i in indices if type(self.network[i].message).__name__ == kind]
        return alike[number // len(kinds) % len(alike)]

    def deliver(self, index: int) -> None:
        """Let a message arrive."""
        packet = self.network.pop(index)
        if packet.to in self.inbox:
            self.inbox[packet.to].append(Received(packet.sender, deepcopy(packet.message)))
        else:
            self.unnoticed.append(self.child_end(packet.sender, packet.to))

    def repeat(self, index: int) -> None:
        """There is a second copy of a message, which arrives late."""
        self.late.append(self.network[index])

    def delay(self, index: int) -> None:
        self.late.append(self.network.pop(index))

    def arrive_late(self, index: int) -> None:
        """A message of any time ago comes to those under way, and ahead of them."""
        self.network.insert(0, self.late.pop(index))

    def drop(self, index: int) -> None:
        packet = self.network.pop(index)
        self.unnoticed.append(self.child_end(packet.sender, packet.to))

    def notice_loss(self, index: int) -> None:
        session = session_of(self.unnoticed.pop(index))
        if session in self.inbox:
            self.inbox[session].append(LinkLost())

    def cut_link(self, child: NodeId, *, lossy: bool) -> None:
        """Nothing passes for a while: what is under way is lost, or only late."""
        self.cut[child] = lossy
        for i in reversed(range(len(self.network))):
            if lossy and self.child_end(self.network[i].sender, self.network[i].to) == child:
                self.drop(i)

    def mend_link(self, child: NodeId) -> None:
        self.cut.pop(child, None)

    # ------------------------------------------------------------ events

    def handle(self, name: NodeId) -> None:
        """Let a node handle the first event that waits for it."""
        event = self.inbox[name].popleft()
        self.touched.add(name)
        for effect in self.nodes[name].handle(event, now=self.now):
            if isinstance(effect, Tell) and isinstance(effect.notice, RaiseFence):
                self.memory_lost |= isinstance(event, DeadlineReached)  # it was given up
                assert self.memory_lost, "a child that did nothing wrong is expelled"
            self._carry_out(name, effect)

    def _carry_out(self, name: NodeId, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                self._send(name, to, message)
            case Reject(to, reason, key, fence, detail):
                self._send(name, to, Refused(reason, key, fence, detail))
            case Tell(to, notice):
                self.inbox[to].append(Told(notice))
            case RunLocalSteps():
                self.jobs[name] = effect
            case Finish():
                pass

    def _send(self, sender: NodeId, to: NodeId, message: Message) -> None:
        child = self.child_end(sender, to)
        if isinstance(message, Resumed) and message.reset and not self.memory_lost:
            state = self.server(process_of(to)).state
            assert state.tenure == 0, "a child that lost nothing has to start again"
        if self.cut.get(child, False):
            self.unnoticed.append(child)
        else:
            self.network.append(Packet(sender, to, deepcopy(message)))

    def settle(self, names: Iterable[NodeId] | None = None) -> None:
        """Let these processes handle all that waits for them."""
        for name in self.tree if names is None else names:
            while name not in self.frozen and any(self.inbox[n] for n in self.nodes_of(name)):
                for node in self.nodes_of(name):
                    while self.inbox[node]:
                        self.handle(node)

    def finish_round(self, worker: NodeId, *, finite: bool = True) -> None:
        """The worker's training ends: each sample adds one to its own parameter."""
        job = self.jobs.pop(worker)
        change = torch.zeros(self.total, dtype=torch.float64)
        for start, end in job.lease.ranges:
            change[start:end] = -1.0 if finite else torch.nan
        samples = job.lease.samples
        done = LocalStepsDone(
            job.lease.id, job.local_steps, samples, 1.0, 1.0, 1.0, Fragments([change])
        )
        self.inbox[worker].append(done)

    def work(self, rounds: int) -> None:
        """For a while what can arrive does so in order, and one round after the other ends."""
        for i in range(rounds):
            for _ in range(len(self.deliverable())):
                if deliverable := self.deliverable():
                    self.deliver(deliverable[0])
            self.settle()
            if ready := sorted(self.jobs.keys() - self.frozen):
                self.finish_round(ready[i % len(ready)])
            self.settle()
            self.check()

    def evict(self, child: NodeId) -> None:
        """The operator has the child's fence raised."""
        members = membership_of(self.tree[child] or "")
        if members in self.inbox:
            self.memory_lost = True
            self.inbox[members].append(Told(RaiseFence(child)))

    # ------------------------------------------------------------ time

    def wait(self, seconds: float, *, heartbeats: bool) -> None:
        """Time passes; with ``heartbeats`` those that can be heard are heard."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + (4.0 if heartbeats else seconds))
            for name, node in self.nodes.items():
                deadline = node.next_deadline()
                if deadline is not None and deadline <= self.now:
                    self.inbox[name].append(DeadlineReached())
            self.settle()
            if heartbeats:
                self._exchange_heartbeats()

    def _exchange_heartbeats(self) -> None:
        for kind in (Heartbeat, HeartbeatSeen):
            for i in reversed(self.deliverable()):
                packet = self.network[i]
                if isinstance(packet.message, kind) and process_of(packet.to) not in self.frozen:
                    self.deliver(i)
            self.settle()

    # ------------------------------------------------------------ what must hold at any moment

    def server(self, name: NodeId) -> Server:
        node = self.nodes[name]
        assert isinstance(node, Server)
        return node

    def over(self, name: NodeId) -> bool:
        state = self.nodes[name].state  # type: ignore[attr-defined]
        return bool(state.over if name in self.workers else state.finished)

    def check(self) -> None:
        touched, self.touched = self.touched, set()
        for name in self.servers:
            if not self.alive(name):
                continue
            if name in touched:
                self._check_books(name)
                self._check_tensors(name)
                self._check_only_grows(name)
            parent = self.tree[name]
            if parent is not None and self.alive(parent) and touched & {name, parent}:
                self._check_against_parent(name, parent)

    def _check_books(self, name: NodeId) -> None:
        """Each position is in one place; a worker holds its lease and nothing else."""
        state = self.server(name).state
        ledger = state.leasing.ledger
        places = [(b.start, b.end) for b in (*ledger.fresh, *ledger.returned)]
        places += [r for held in ledger.held.values() for r in held]
        if name == "root":
            places += [(s.next, s.end or 0) for s in ledger.sections]
            places += list(ledger.credited)
            assert positions(ledger.delivered) <= positions(ledger.credited)
            assert disjoint(places) == set(range(self.total)), "a position is missing or unknown"
        else:
            disjoint([*places, *state.pending.contained, *state.pending.dropped, *in_push(state)])
        for block in (*ledger.fresh, *ledger.returned):
            self._check_dataset(block.dataset, block.origin, [(block.start, block.end)])
        stock = sum(b.end - b.start for b in (*ledger.fresh, *ledger.returned))
        assert ledger.stock == stock, "the running total of the stock is wrong"
        for child, entry in state.leasing.children.items():
            if entry.role == "worker":
                held = positions(ledger.held.get(child, ()))
                assert held == positions(entry.lease.ranges if entry.lease else ())
                if entry.lease is not None:
                    assert entry.lease.dataset in entry.datasets
                    lease = entry.lease
                    self._check_dataset(lease.dataset, lease.origin, list(lease.ranges))

    def _check_dataset(self, dataset: str, origin: int, ranges: list[Range]) -> None:
        """The ranges are of this data set, which begins at ``origin``."""
        counts = list(self.samples.items())
        begins = {d: sum(n for _, n in counts[:i]) for i, (d, _) in enumerate(counts)}
        assert origin == begins[dataset]
        end = origin + self.samples[dataset]
        assert all(origin <= first <= last <= end for first, last in ranges)

    def _check_tensors(self, name: NodeId) -> None:
        """Parameters hold the changes of just those samples that the books say."""
        server = self.server(name)
        tensors, state = server.tensors, server.state
        assert isinstance(tensors, TorchState)
        (theta,) = tensors.theta
        if tensors.base is None:
            change, inside = theta, positions(state.leasing.ledger.delivered)
        else:
            (base,) = tensors.base
            change = theta - base
            inside = positions(state.pending.contained)
            inside |= positions(state.push.report.contained if state.push else ())
        for position, value in enumerate(change.tolist()):
            assert abs(value - (position in inside)) < 1e-6

    def _check_only_grows(self, name: NodeId) -> None:
        members = membership_of(name)
        fence = self.nodes[members].state.last_fence  # type: ignore[attr-defined]
        state = self.server(name).state
        if not any(isinstance(e, Started) for e in self.inbox[members]):
            assert fence >= self.highest.get(members, 0)
            self.highest[members] = fence
        assert state.version >= self.highest.get(name, 0)
        self.highest[name] = state.version
        for worker in self.workers:
            if self.tree[worker] == name and (fence := self._fence(worker)) is not None:
                assert fence <= self.highest.get(members, 0), "a fence that nobody issued"

    def _fence(self, name: NodeId) -> int | None:
        return self.nodes[name].state.fence if self.alive(name) else None  # type: ignore[attr-defined]

    def _check_against_parent(self, name: NodeId, parent: NodeId) -> None:
        """If the parent would let the child go on, their books agree on what the child holds."""
        state = self.server(name).state
        above = self.server(parent).state.leasing
        child = above.children.get(name)
        in_flight = state.push is not None
        resume = Resume(
            fence=0,
            tenure=state.tenure,
            sequence=state.sequence,
            in_flight=in_flight,
            base_version=state.base_version,
            granted=state.leasing.granted,
            pushed_under=state.push.fence if state.push else 0,
        )
        if child is None or not child.continued_by(resume):
            return
        ledger = state.leasing.ledger
        mine = [(b.start, b.end) for b in (*ledger.fresh, *ledger.returned)]
        mine += [r for held in ledger.held.values() for r in held]
        mine += [*state.pending.contained, *state.pending.dropped]
        if not (in_flight and child.sequence == state.sequence):
            mine += in_push(state)
        if child.granted == state.leasing.granted + 1 and child.grant is not None:
            mine += [(b.start, b.end) for b in child.grant.blocks]
        assert disjoint(mine) == positions(above.ledger.held.get(name, ()))

    # ------------------------------------------------------------ the end

    def heal(self, gone: Iterable[NodeId] = ()) -> None:
        """Everything is mended but what is ``gone`` for good; the run must then come to its end."""
        gone = self.with_descendants(gone)
        self.frozen.clear()
        self.cut.clear()
        self.network += self.late
        self.late.clear()
        for name in self.tree:
            if name in gone and self.alive(name):
                self.kill(name)
            elif name not in gone and not self.alive(name):
                self.start(name, self.saved[name] if name == "root" else None)
        for _ in range(4000):
            if self._let_all_happen():
                continue
            if all(self.over(name) for name in self.tree if self.alive(name)):
                break
            deadlines = [d for n in self.nodes.values() if (d := n.next_deadline()) is not None]
            assert deadlines, "the run hangs: nothing is under way and nobody waits for a time"
            self.wait(max(0.01, min(deadlines) - self.now), heartbeats=False)
        else:
            raise AssertionError("the run does not come to its end")
        ledger = self.server("root").state.leasing.ledger
        assert ledger.credited.as_tuple() == ((0, self.total),)
        if not self.memory_lost and self.settings.in_flight == "carry":
            assert ledger.delivered.as_tuple() == ((0, self.total),), "work was lost on the way"

    def with_descendants(self, names: Iterable[NodeId]) -> set[NodeId]:
        gone = set(names)
        for name, parent in self.tree.items():
            if parent in gone:
                gone.add(name)
        return gone

    def _let_all_happen(self) -> bool:
        """Deliver and finish what can be; whether there was anything."""
        waiting = any(self.inbox.values())
        if not (waiting or self.network or self.unnoticed or self.jobs):
            return False
        self.settle()
        for _ in range(len(self.network)):
            self.deliver(0)
        while self.unnoticed:
            self.notice_loss(0)
        self.settle()
        for worker in sorted(self.jobs):
            self.finish_round(worker)
        self.settle()
        self.check()
        return True


def positions(ranges: Iterable[Range]) -> set[int]:
    return {p for start, end in ranges for p in range(start, end)}


def disjoint(ranges: Iterable[Range]) -> set[int]:
    listed = [p for start, end in ranges for p in range(start, end)]
    result = set(listed)
    assert len(listed) == len(result), "a position is in two places"
    return result


def in_push(state: ServerState) -> list[Range]:
    if state.push is None:
        return []
    return [*state.push.report.contained, *state.push.report.dropped]
