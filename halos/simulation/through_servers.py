"""Methods whose workers meet at parameter servers: the production core on the virtual clock."""

from __future__ import annotations

import os

from halos.core.fragments import Fragments
from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.messages import Node, NodeId, Push, Received, WorkerUpdate
from halos.core.server import Server, ServerSettings
from halos.core.state import EXACT
from halos.core.tensors import NullState, TensorState
from halos.core.topology import ROOT
from halos.errors import UserError
from halos.runtime.dispatcher import Step
from halos.runtime.plan import RunPlan
from halos.runtime.virtual import VirtualClock
from halos.simulation.corrections import STATES
from halos.simulation.faults import FaultyRun, faults_of
from halos.simulation.links import RoundedLinks, ratio
from halos.simulation.methods import Servers
from halos.simulation.modelled_time import EnvironmentModel
from halos.simulation.outcome import Outcome
from halos.simulation.recording import Recorder
from halos.simulation.world import World

STALL_S = 10 * 86400.0  # virtual: longer than any round worth simulating
QUIET = MembershipSettings(heartbeat_interval_s=0)  # nobody ever falls silent


class ServersRun:
    """One run of the core in an environment."""

    def __init__(self, world: World, settings: Servers) -> None:
        self.world, self.settings = world, settings
        environment = world.experiment.environment
        self.topology = environment.tree() if settings.tree else environment.star()
        self.model = EnvironmentModel(
            environment,
            self.topology,
            up_ratio=ratio(settings.up),
            down_ratio=ratio(settings.down),
            seed=world.experiment.seed,
        )
        self.links = RoundedLinks(settings.up, settings.down)
        self.sync = settings.resolved(self.topology)
        self.plan = self._plan()
        laboratory = world.laboratory
        self.trainers = {
            worker.name: laboratory.trainer() for worker in self.topology.workers if laboratory
        }
        self._reached, self._reached_at = 0, 0.0
        self._cold = next((t.capture(before=None) for t in self.trainers.values()), {})
        self.clock = self._clock()
        workers = [worker.name for worker in self.topology.workers]
        self.recorder = Recorder(workers, self.model.size_bytes, world.experiment.window_s)
        self.clock.observers.append(self.recorder)
        if laboratory is not None:
            self.clock.observers.append(self._measure)

    def run(self) -> Outcome:
        """To the end, to the hours asked for, or until the world is stopped."""
        experiment, clock = self.world.experiment, self.clock
        faulty = FaultyRun(clock, self.plan, self.topology, ended=self._ended, reborn=self._reborn)
        faults = faults_of(experiment.environment, self.topology, experiment.seed)
        clock.start()
        faulty.run(faults, until=experiment.until_s, tick=self._goes_on)
        clock.close()
        return self._outcome()

    def _goes_on(self) -> bool:
        """Raises ``UserError`` when nothing comes of the run any more."""
        now, reached = self.clock.now, self.root.state.reported.local_steps
        self.world.progress(now, reached)
        if reached != self._reached:
            self._reached, self._reached_at = reached, now
        elif self.world.experiment.until_s is None and now > self._reached_at + STALL_S:
            raise UserError(
                f"method {self.world.experiment.method.name}: nothing reached the root for "
                f"{STALL_S / 86400:.0f} days after {reached} local steps; give --hours, a lower k, "
                "or an environment in which workers stay"
            )
        return not self.world.stopped

    def _ended(self, worker: NodeId) -> None:
        self.recorder.ended(worker, self.clock.now)

    def _reborn(self, worker: NodeId) -> None:
        """A process that starts again has cold moments."""
        if worker in self.trainers:
            self.trainers[worker].restore(self._cold)

    @property
    def root(self) -> Server:
        root = self.clock.nodes[ROOT]
        assert isinstance(root, Server)
        return root

    def _plan(self) -> RunPlan:
        experiment = self.world.experiment
        settings = ServerSettings(
            leasing=LeasingSettings(
                batch_size=experiment.batch_size,
                local_steps=self.sync.local_steps,
                local_steps_of=self.topology.local_steps(self.sync.local_steps),
                # Without latency asking takes no time; with it nobody is to wait for an answer.
                lease_block=None if experiment.environment.latency_ms else 0,
            ),
            accumulation=self.sync.accumulation,
            merge_weight=self.sync.merge_weight,
            in_flight=self.sync.in_flight,
            stop_after_local_steps=experiment.local_steps,
        )
        return RunPlan(
            topology=self.topology,
            identity=Identity(run="simulated", model="model", datasets=("text",)),
            membership=MembershipSettings() if experiment.environment.has_faults else QUIET,
            samples={"text": None},
            server_settings=lambda _: settings,
            tensors=self._tensors,
        )

    def _tensors(self, server: NodeId) -> TensorState:
        laboratory, settings = self.world.laboratory, self.settings
        if laboratory is None:
            return NullState()
        outer = self.sync.root if server == ROOT else self.sync.local
        state = STATES[settings.correction]
        links = self.links.roundings
        return state.start(laboratory.start, outer, links, has_parent=server != ROOT)

    def _clock(self) -> VirtualClock:
        nodes: dict[NodeId, Node] = self.plan.nodes()
        threads = min(os.cpu_count() or 1, self.world.experiment.threads)
        clock = VirtualClock(
            nodes,
            self.model,
            {name: trainer.run for name, trainer in self.trainers.items()},
            threads=threads if threads > 1 else 0,
            undo={name: trainer.undo for name, trainer in self.trainers.items()},
        )
        if self.world.laboratory is not None and self.links.roundings != EXACT:
            clock.carry = self.links
        for trainer in self.trainers.values():
            trainer.stop = self.world.stop
        return clock

    def _measure(self, step: Step) -> None:
        laboratory = self.world.laboratory
        assert laboratory is not None
        if step.node != ROOT or not isinstance(step.event, Received):
            return
        if isinstance(step.event.message, Push | WorkerUpdate):
            reported = self.root.state.reported
            laboratory.measure_if_due(
                self._theta(), step.time, reported.local_steps, reported.tokens
            )

    def _theta(self) -> Fragments:
        theta = self.root.tensors.publish()
        assert isinstance(theta, Fragments)
        return theta

    def _outcome(self) -> Outcome:
        now, reported = self.clock.now, self.root.state.reported
        ledger = self.root.state.leasing.ledger
        laboratory = self.world.laboratory
        return self.world.outcome(
            finished=self.clock.finished or now == self.world.experiment.until_s,
            elapsed_s=now,
            local_steps=reported.local_steps,
            tokens=reported.tokens,
            model=self._theta() if laboratory is not None else None,
            utilization=self.recorder.utilization(now),
            wide_area_bytes=self.recorder.wide_area_bytes,
            delivered=ledger.delivered.total / max(1, ledger.credited.total),
            mean_staleness=self.recorder.mean_staleness,
            max_staleness=self.recorder.max_staleness,
            lanes=self.recorder.lanes(now),
        )
