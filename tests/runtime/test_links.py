"""A link that is cut amid a transfer: both ends finish after the repair, nothing counts twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

import halos
from halos.core.messages import Push, Received, Reject, WorkerUpdate
from halos.runtime import server_process
from halos.runtime.dispatcher import Step
from halos.runtime.server_process import ServerProcess
from halos.wire.frames import CHUNK_BYTES
from halos.wire.link import LinkSettings, LinkThread
from halos.wire.security import Security
from workers.worker import train

from .conftest import Spec
from .whole import END_S, Whole, whole_run

Direction = Literal["up", "down"]
Mode = Literal["drop", "reset"]
MODEL = {"layers": 4, "heads": 4, "width": 128}
FAST = LinkSettings(rate_mbps=400, rtt_ms=1)
CUT_S = 120
CONTROL_BYTES = 150_000  # at most, of all that is no tensor
CUTS = pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
WAYS = pytest.mark.parametrize("direction", ["up", "down"])
MODES = pytest.mark.parametrize("mode", ["drop", "reset"])


class Applied:
    """How often each update was applied at a server."""

    def __init__(self, process: ServerProcess) -> None:
        self.times: Counter[str] = Counter()
        process.driver.observers.append(self)

    def __call__(self, step: Step) -> None:
        match step.event:
            case Received(sender, WorkerUpdate(lease=key) | Push(sequence=key)):
                if not any(isinstance(effect, Reject) for effect in step.effects):
                    self.times[f"{sender} {key}"] += 1


@contextmanager
def link_to(process: ServerProcess) -> Iterator[LinkThread]:
    with LinkThread("127.0.0.1:0", process.address, FAST) as link:
        yield link


def model_bytes(whole: Whole) -> int:
    return 4 * whole.coordinator.children.layout.numel


@CUTS
@WAYS
@MODES
def test_a_workers_exchange_is_cut(
    specification: Spec, share: float, direction: Direction, mode: Mode
) -> None:
    settings = specification(
        model=MODEL,
        regions=[],
        root={"workers": 1},
        sync={"preset": "paper", "local_steps": 2, "accumulation": 2},
        training={"local_steps_total": 8, "batch_size": 2},
    )
    with whole_run(settings) as whole, link_to(whole.coordinator) as link:
        applied, size = Applied(whole.coordinator), model_bytes(whole)
        assert size > 3_000_000
        link.cut_after(int(share * size), direction, mode)
        loop = whole.threads.submit(joined, link.address)
        link.wait_until_cut(CUT_S)
        before = link.carried
        link.mend()
        whole.end(loop)
        after = link.carried
        ledger = whole.coordinator.server.state.leasing.ledger
        assert ledger.all_credited and ledger.credited.total == 16
        assert applied.times and set(applied.times.values()) == {1}
        assert getattr(after, direction) > getattr(before, direction)
        if direction == "up" and share >= 0.5:
            # An update goes on where it was cut; a model may be a newer one by then.
            assert after.up < 4 * size + CONTROL_BYTES + 2 * CHUNK_BYTES


def joined(address: str) -> bool:
    with halos.join(address) as run:
        return train(run)


@CUTS
@WAYS
def test_a_regions_exchange_is_cut(
    specification: Spec, tmp_path: Path, share: float, direction: Direction
) -> None:
    settings = specification(
        model=MODEL,
        regions=[{"name": "eu", "workers": 1}],
        sync={"preset": "paper", "local_steps": 2, "accumulation": 2, "in_flight": "carry"},
        training={"local_steps_total": 12, "batch_size": 2},
    )
    told, about = server_process.told_by(settings)
    plain, listen = Security.plain(), "127.0.0.1:0"
    with (
        server_process.coordinator(told, about, listen, plain) as root,
        link_to(root) as link,
    ):
        whole = Whole(settings.run.directory, root)
        whole.serving["root"] = whole.threads.submit(root.run)
        applied, size = Applied(root), model_bytes(whole)
        link.cut_after(int(share * size), direction, "reset")
        joining = server_process.region(
            "eu", link.address, listen, plain, directory=tmp_path / "servers" / "eu"
        )
        with joining as region:
            whole.regions["eu"] = region
            whole.serving["eu"] = whole.threads.submit(region.run)
            loop = whole.train(train, "eu")
            link.wait_until_cut(CUT_S)
            link.mend()
            assert loop.result(timeout=END_S)
            whole.end()
        ledger = root.server.state.leasing.ledger
        assert ledger.all_credited and ledger.credited.total == 24
        assert applied.times and set(applied.times.values()) == {1}
        whole.threads.shutdown()
