"""A thousand regions of ten workers for a hundred hours: what timing-only simulation is sized for.

Rounds take 600 s and messages no time; each lease is cut from what a region keeps in stock.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.server import Server, ServerSettings
from halos.core.tensors import NullState
from halos.core.topology import ROOT, ServerPlace, Topology, WorkerPlace
from halos.runtime.plan import RunPlan
from halos.runtime.timing import UniformTime
from halos.runtime.virtual import VirtualClock
from halos.simulation.recording import Recorder

ROUND_S, LOCAL_STEPS, BATCH_SIZE, ACCUMULATION = 600, 8, 8, 32
LIMIT_S = 900  # of wall time; five minutes is the aim on a core of one's own
LIMIT_BYTES = 2e9


def simulate(*, regions: int, workers: int, hours: float) -> dict[str, float]:
    """Counts of the run, and what this process took for it."""
    tree = Topology(
        (ServerPlace(ROOT, None), *(ServerPlace(f"r{r}", ROOT) for r in range(regions))),
        tuple(WorkerPlace(f"r{r}/{w}", f"r{r}") for r in range(regions) for w in range(workers)),
    )
    settings = ServerSettings(
        leasing=LeasingSettings(batch_size=BATCH_SIZE, local_steps=LOCAL_STEPS),
        accumulation=ACCUMULATION,
    )
    plan = RunPlan(
        topology=tree,
        identity=Identity(run="run", model="model", datasets=("text",)),
        membership=MembershipSettings(heartbeat_interval_s=0),
        samples={"text": None},
        server_settings=lambda _: settings,
        tensors=lambda _: NullState(),
    )
    clock = VirtualClock(plan.nodes(), UniformTime(tree, step_s=ROUND_S / LOCAL_STEPS))
    recorder = Recorder([worker.name for worker in tree.workers], lambda *_: 0, 60.0)
    clock.observers.append(recorder)
    began = time.perf_counter()
    clock.start()
    clock.run(until=hours * 3600)
    seconds = time.perf_counter() - began
    root = clock.nodes[ROOT]
    locals_ = [node for name, node in clock.nodes.items() if isinstance(node, Server)]
    assert isinstance(root, Server)
    ledger = root.state.leasing.ledger
    return {
        "rounds": sum(server.state.version for server in locals_) - root.state.version,
        "pushes": root.state.version,
        "credited": ledger.credited.total,
        "ranges": max(len(ledger.credited), len(ledger.delivered)),
        "utilization": recorder.utilization(clock.now),
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def check_counts(found: dict[str, float], *, regions: int, workers: int, hours: float) -> None:
    """Rounds end, a nanosecond apart, just after each multiple of ten minutes."""
    rounds = int(hours * 3600 / ROUND_S) - 1
    pushes = rounds * workers // ACCUMULATION
    assert found["rounds"] == pytest.approx(rounds * workers * regions, abs=workers * regions)
    assert found["pushes"] == pytest.approx(pushes * regions, abs=regions)
    samples = LOCAL_STEPS * BATCH_SIZE
    assert found["credited"] == found["pushes"] * ACCUMULATION * samples
    assert found["utilization"] == pytest.approx(1.0)


def test_counts_of_a_small_one() -> None:
    found = simulate(regions=20, workers=10, hours=10)
    check_counts(found, regions=20, workers=10, hours=10)


def test_books_do_not_grow_with_the_length_of_the_run() -> None:
    short, long = (simulate(regions=5, workers=10, hours=hours) for hours in (10, 40))
    assert long["ranges"] <= short["ranges"] + 5


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_full_size_fits_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, whose peak is not that of other tests."""
    code = (
        "import json; from tests.simulation import test_scale as t;"
        "print(json.dumps(t.simulate(regions=1000, workers=10, hours=100)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    found = json.loads(ran.stdout)
    with capsys.disabled():
        print(f"\n{found['rounds']:,} rounds in {found['seconds']:.0f} s,", end=" ")
        print(f"{found['peak_bytes'] / 1e6:,.0f} MB at most")
    check_counts(found, regions=1000, workers=10, hours=100)
    assert found["peak_bytes"] < LIMIT_BYTES
