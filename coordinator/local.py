"""The processes of one run on this machine: their command lines, links and certificates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from coordinator.fleet import Fleet, Process
from halos.core.topology import ROOT
from halos.errors import UserError
from halos.runtime.control import ADDRESS, announced, status_of_server
from halos.runtime.status import RunStatus, status_told
from halos.specification import RunSpecification
from halos.wire.link import LinkThread
from halos.wire.roles import Role
from halos.wire.security import Security

LEAVE_S = 20.0  # for the others to hear that the run is over


@dataclass
class LocalProcesses:
    """The processes of one run on this machine."""

    settings: RunSpecification
    path: Path
    fleet: Fleet
    certs: Path | None
    trace: Path | None
    security: Security
    links: dict[str, LinkThread] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def of(
        cls, settings: RunSpecification, path: Path, tls: bool, trace: Path | None
    ) -> Iterator[LocalProcesses]:
        """They are ended, at the latest, when this is left."""
        folder = settings.run.directory
        certs = make_certificates(settings, folder / "certs") if tls else None
        security = Security.from_folder(certs / "operator") if certs else Security.plain()
        if trace is not None:
            trace.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // max(1, len(settings.workers)))
        fleet = Fleet(folder / "logs", threads)
        local = cls(settings, path, fleet, certs, trace, security)
        try:
            yield local
        finally:
            local.end(finished=False)
            for link in local.links.values():
                link.close()

    @property
    def coordinator(self) -> Process:
        return self.fleet.processes["coordinator"]

    def start(self, stop: Callable[[], bool]) -> None:
        """Everything, parents first; returns early when ``stop`` holds."""
        topology = self.settings.topology
        for server in topology.servers:  # what a process said that was killed
            (self._folder_of(server.name) / ADDRESS).unlink(missing_ok=True)
        coordinator = self.fleet.start("coordinator", self._coordinator)
        self._listens(coordinator, ROOT, stop)
        for place in topology.servers:
            if place.parent is None or stop():
                continue
            self._listens(self.fleet.processes[_name(place.parent)], place.parent, stop)
            if not stop():
                self._link(place.name, place.parent)
                self.fleet.start(_name(place.name), partial(self._server, place.name, place.parent))
        for worker in topology.workers:
            self._listens(self.fleet.processes[_name(worker.parent)], worker.parent, stop)
            if not stop():
                self.fleet.start(worker.name, partial(self._worker, worker.name, worker.parent))
        if not stop():
            self.fleet.start("evaluation", self._evaluation)

    def status(self) -> RunStatus | None:
        """What the coordinator says of the run, if it answers just now."""
        address = announced(self._folder_of(ROOT))
        try:
            return status_told(status_of_server(address, self.security)) if address else None
        except UserError:
            return None  # it is being started again

    def end(self, *, finished: bool) -> None:
        """Workers first, so that they can still say goodbye; all save what they have."""
        everybody = list(self.fleet.processes)
        if finished:
            self.fleet.wait(everybody, LEAVE_S)
        workers = [w.name for w in self.settings.workers if w.name in everybody]
        servers = [_name(s.name) for s in reversed(self.settings.topology.servers)]
        self.fleet.end([n for n in ("evaluation", *workers) if n in everybody])
        for name in servers:
            if name in everybody:
                self.fleet.end([name])

    def traffic(self) -> dict[str, dict[str, int]] | None:
        """Bytes that crossed the emulated links, each way."""
        if not self.links:
            return None
        return {name: link.carried._asdict() for name, link in self.links.items()}

    # ------------------------------------------------------------ command lines

    def _coordinator(self) -> list[str]:
        return ["coordinator", str(self.path), *self._listen(ROOT), *self._common("coordinator")]

    def _server(self, region: str, parent: str) -> list[str]:
        link = self.links.get(region)
        join = link.address if link is not None else self.addresses[parent]
        kept = ["--directory", str(self._folder_of(region))]
        return [
            "server", "--region", region, "--join", join, *kept, *self._listen(region),
            *self._common(region),
        ]  # fmt: skip

    def _worker(self, name: str, parent: str) -> list[str]:
        kept = ["--directory", str(self.settings.run.directory / "workers" / name)]
        join = self.addresses[parent]
        return ["worker", "--join", join, "--name", name, *kept, *self._common(name, "worker")]

    def _evaluation(self) -> list[str]:
        certs = ["--certs", str(self.certs / "operator")] if self.certs else []
        return ["eval", "--follow", self.addresses[ROOT], *certs]

    def _listen(self, server: str) -> list[str]:
        """The same address at every start, so that children find it again."""
        return ["--listen", self.addresses.get(server, "127.0.0.1:0")]

    def _common(self, name: str, role: str | None = None) -> list[str]:
        certs = ["--certs", str(self.certs / (role or name))] if self.certs else []
        if self.trace is None:
            return certs
        return [*certs, "--trace", str(self.trace / f"{name.replace('/', '-')}.jsonl")]

    def _listens(self, process: Process, server: str, stop: Callable[[], bool]) -> None:
        """Wait for a server's address."""
        folder = self._folder_of(server)
        if server not in self.addresses:
            self.fleet.wait_for(process, lambda: announced(folder) is not None, stop)
            if (address := announced(folder)) is not None:
                self.addresses[server] = address

    def _folder_of(self, server: str) -> Path:
        folder = self.settings.run.directory
        return folder if server == ROOT else folder / "servers" / server

    def _link(self, region: str, parent: str) -> None:
        settings = self.settings.link_of(region)
        if settings is not None:
            link = LinkThread("127.0.0.1:0", self.addresses[parent], settings)
            link.start()
            self.links[region] = link


def _name(server: str) -> str:
    return "coordinator" if server == ROOT else server


def make_certificates(settings: RunSpecification, folder: Path) -> Path:
    """An authority and a folder for each process of a run here, made once."""
    from halos.wire.certificates import issue, make_authority

    authority = folder / "authority"
    if not authority.exists():
        make_authority(authority)
    wanted: dict[str, Role] = {"coordinator": "coordinator", "worker": "worker"}
    wanted["operator"] = "operator"
    for region in settings.regions:
        wanted[region.name] = "server"
    for name, role in wanted.items():
        if not (folder / name).exists():
            issue(authority, folder / name, role, name)
    return folder
