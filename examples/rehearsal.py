"""A run beside its prediction: how far `halos simulate` is from what happens.

    python examples/rehearsal.py examples/rehearsal.toml

Runs the specification with `halos up`, all processes on this machine, over the networks that it
emulates. Takes from the traces how long a local step took and how long a worker waited for its
server between two rounds, simulates the same run with these two numbers, and sets both side by
side. Of one's own run, a short one: then a long one on the same machines can be predicted. The
run's directory must not be there yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from halos.runtime.losses import LOSSES, read_points
from halos.runtime.status import Point
from halos.simulation.outcome import reached
from halos.specification import load_specification

SHARES = (0.2, 0.35, 0.5, 0.7, 0.9)  # of the run's time, where losses are compared


def halos(*arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "coordinator", *map(str, arguments), "--json"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def lines(trace: Path) -> Iterator[dict[str, Any]]:
    with trace.open() as file:
        next(file)  # about the run
        yield from map(json.loads, file)


def of_worker(trace: Path) -> tuple[list[float], list[float]]:
    """Milliseconds a local step, and from the end of a round to the start of the next."""
    steps, waits = [], []
    began, ended = 0.0, None
    for line in lines(trace):
        now, event = line["time"], line["event"]
        if event["type"] == "LocalStepsDone":
            steps.append((now - began) / event["local_steps"] * 1e3)
            ended = now
        if any(effect["type"] == "RunLocalSteps" for effect in line["effects"]):
            if ended is not None:
                waits.append((now - ended) * 1e3)
            began = now
    return steps, waits


def began_s(trace: Path) -> float:
    """When the root was first asked for samples: somewhere, a worker was ready."""
    return next(
        line["time"]
        for line in lines(trace)
        if line["event"].get("message", {}).get("type") == "BlockRequest"
    )


def time_to(points: Sequence[Point], loss: float) -> float | None:
    at = reached(points, loss)
    return None if at is None else at.elapsed_s


def row(name: str, predicted: float | None, was: float | None, unit: str) -> str:
    if predicted is None or was is None:
        return f"{name:<22} {'not reached':>12}"
    off = predicted / was - 1
    return f"{name:<22} {predicted:>9.2f} {unit:<2} {was:>9.2f} {unit:<2} {off:>+8.1%}"


def main(file: str) -> None:
    specification = load_specification(Path(file))
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder)
        real = halos("up", file, "--trace", traces)
        names = [worker.name.replace("/", "-") for worker in specification.workers]
        workers = [of_worker(traces / f"{name}.jsonl") for name in names]
        start = began_s(traces / "coordinator.jsonl")
    # Of workers of unequal speed, what a step takes at speed 1.
    speeds = [worker.speed for worker in specification.workers]
    speeds = [speed / max(speeds) for speed in speeds]
    step_ms = mean(mean(steps) * s for (steps, _), s in zip(workers, speeds, strict=True))
    wait_ms = mean(mean(waits) for _, waits in workers)
    print(f"a local step took {step_ms:.2f} ms, the wait between two rounds {wait_ms:.2f} ms")
    options = ("--step-ms", f"{step_ms:.3f}", "--exchange-ms", f"{wait_ms:.3f}")
    foreseen = halos("simulate", "--run", file, *options)

    kept = read_points(specification.run.directory / LOSSES)
    was = [replace(p, elapsed_s=p.elapsed_s - start) for p in kept if p.elapsed_s >= start]
    predicted = [Point(**point) for point in foreseen["points"]]
    print(f"{'':<22} {'predicted':>12} {'was':>12} {'off':>8}")
    for share in SHARES:
        loss = min(point.loss for point in was if point.elapsed_s <= share * was[-1].elapsed_s)
        print(row(f"to a loss of {loss:.2f}", time_to(predicted, loss), time_to(was, loss), "s"))
    sent = sum(way for link in real["wide_area_bytes"].values() for way in link.values())
    print(row("wide-area links", foreseen["wide_area_bytes"] / 1e6, sent / 1e6, "MB"))
    print(row("final loss", foreseen["final_loss"], real["validation_loss"], ""))


if __name__ == "__main__":
    main(sys.argv[1])
