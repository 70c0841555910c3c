"""A whole run over gRPC in the test's own process: the real servers, sockets and joined loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import halos
from halos.runtime import server_process
from halos.runtime.server_process import ServerProcess
from halos.specification import RunSpecification
from halos.wire.link import LinkSettings, LinkThread
from halos.wire.security import Security

END_S = 240.0


@dataclass
class Whole:
    """Coordinator, servers of all regions, and whoever joins."""

    folder: Path
    coordinator: ServerProcess
    regions: dict[str, ServerProcess] = field(default_factory=dict)
    serving: dict[str, Future[bool]] = field(default_factory=dict)
    links: dict[str, LinkThread] = field(default_factory=dict)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))
    joined: list[halos.Run] = field(default_factory=list)

    def address(self, server: str) -> str:
        return self.regions[server].address if server in self.regions else self.coordinator.address

    def train(self, loop: Callable[[halos.Run], Any], server: str, **options: Any) -> Future[Any]:
        """Join ``server`` and run ``loop``, in a thread."""

        def work() -> Any:
            with halos.join(self.address(server), **options) as run:
                self.joined.append(run)
                return loop(run)

        return self.threads.submit(work)

    def end(self, *loops: Future[Any]) -> list[Any]:
        """Wait for the end of the run everywhere, or for the first that fails; what the loops
        returned."""
        wait([*loops, *self.serving.values()], END_S, FIRST_EXCEPTION)
        for each in (*self.serving.values(), *loops):
            if each.done():
                each.result()
        results = [loop.result(timeout=END_S) for loop in loops]
        for name, serving in self.serving.items():
            assert serving.result(timeout=END_S), f"{name} did not finish"
        return results


@contextmanager
def whole_run(
    specification: RunSpecification, traces: Path | None = None, *, linked: bool = False
) -> Iterator[Whole]:
    """All servers of ``specification``, listening; each traces into a file of ``traces``.

    ``linked``: each region reaches its parent through one of ``links``, which can be cut.
    """

    def trace(name: str) -> Path | None:
        return traces / f"{name}.jsonl" if traces is not None else None

    with ExitStack() as stack:
        told, about = server_process.told_by(specification)
        plain, listen = Security.plain(), "127.0.0.1:0"
        root = stack.enter_context(
            server_process.coordinator(told, about, listen, plain, trace=trace("root"))
        )
        whole = Whole(specification.run.directory, root)
        stack.callback(whole.threads.shutdown, wait=True, cancel_futures=True)
        whole.serving["root"] = whole.threads.submit(root.run)
        for place in specification.topology.servers:
            if place.parent is None:
                continue
            address = whole.address(place.parent)
            if linked:
                link = stack.enter_context(LinkThread(listen, address, LinkSettings()))
                whole.links[place.name], address = link, link.address
            process = stack.enter_context(
                server_process.region(
                    place.name,
                    address,
                    listen,
                    plain,
                    directory=whole.folder / "servers" / place.name,
                    trace=trace(place.name),
                )
            )
            whole.regions[place.name] = process
            whole.serving[place.name] = whole.threads.submit(process.run)
        stack.callback(lambda: [p.driver.stop() for p in (root, *whole.regions.values())])
        stack.callback(lambda: [run.stop() for run in whole.joined])
        yield whole
