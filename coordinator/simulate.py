"""``halos simulate``: what a run would do, on modelled machines and networks."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from coordinator.process import AsJson, Trace, stopped_by_signals
from halos.errors import UserError

if TYPE_CHECKING:
    from halos.simulation.environment import Environment
    from halos.simulation.experiment import Experiment
    from halos.simulation.methods import Method
    from halos.simulation.outcome import Outcome
    from halos.specification import RunSpecification

Run = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN.toml",
        help="Model, data and inner optimizer of this specification, not the built-in ones.",
    ),
]


def simulate(
    environment: Annotated[
        str | None, typer.Argument(metavar="ENV", help="A TOML file, or a name from --list.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="From --list, such as halos:k=4. By default fast.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of model, data and chance.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Local steps of all workers, 6144 by default; a run ends with the first change at "
            "the root that brings the steps known there to as many.",
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="End after so many virtual hours, at the latest.")
    ] = None,
    timing_only: Annotated[
        bool, typer.Option("--timing-only", help="Let time pass and train nothing.")
    ] = False,
    run: Run = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="Without ENV: simulate RUN itself, its regions, links and settings; a local step "
            "of its fastest worker takes so many milliseconds."
        ),
    ] = None,
    exchange_ms: Annotated[
        float,
        typer.Option(
            min=0, help="Beside --step-ms: milliseconds a worker waits for its server each round."
        ),
    ] = 0.0,
    trace: Trace = None,
    as_json: AsJson = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Which environments and methods there are.")
    ] = False,
) -> None:
    """Run a method in an environment on a virtual clock: real gradients, modelled time.

    Ctrl-C ends early, and prints what there is by then.

    Example: halos simulate paper-4x4 --method halos:k=4:up=int4 --steps 1024

    Example: halos simulate --run run.toml --step-ms 30
    """
    if listed:
        print_list(Console(), as_json)
        return
    if environment is None and (run is None or step_ms is None):
        raise UserError(
            "ENV: is missing; give a TOML file, or a name from halos simulate --list, or --run and "
            "--step-ms"
        )
    if environment is not None and step_ms is not None:
        raise UserError(f"--step-ms {step_ms:g}: an ENV has its own; leave one of the two out")
    if step_ms is not None and not 0 < step_ms < math.inf:
        raise UserError(f"--step-ms {step_ms:g}: is not allowed; give a number greater than 0")
    if hours is not None and not 0 < hours < math.inf:
        raise UserError(f"--hours {hours:g}: is not allowed; give a number greater than 0")
    if timing_only and run is not None and environment is not None:
        raise UserError(f"--run {run}: has no use with --timing-only; leave one of the two out")
    console = Console(stderr=as_json)
    own = loaded(run)
    where, how = chosen(environment, method, own, step_ms, exchange_ms)
    experiment = planned(console, where, how, own, seed, steps, hours, timing_only)
    outcome = followed(experiment, trace, console)
    if as_json:
        print(json.dumps(outcome.to_json()))
        return
    print_outcome(outcome, console)


def chosen(
    environment: str | None,
    method: str | None,
    own: RunSpecification | None,
    step_ms: float | None,
    exchange_ms: float,
) -> tuple[Environment, Method]:
    """Where and how: what is named, else as the specification has it. Raises ``UserError``."""
    from halos.simulation.environment import Environment
    from halos.simulation.methods import method_of
    from halos.simulation.own_run import environment_of_run, method_of_run

    if environment is not None:
        return Environment.load(environment), method_of(method or "fast")
    assert own is not None and step_ms is not None
    where = environment_of_run(own, step_ms=step_ms, exchange_ms=exchange_ms)
    return where, method_of(method) if method is not None else method_of_run(own)


def planned(
    console: Console,
    where: Environment,
    how: Method,
    own: RunSpecification | None,
    seed: int,
    steps: int | None,
    hours: float | None,
    timing_only: bool,
) -> Experiment:
    """Raises ``UserError``."""
    from dataclasses import replace

    from coordinator.train import progress_line
    from halos.simulation import planning

    if timing_only:
        return planning.timing_only(where, how, seed, local_steps=steps, hours=hours)
    training = planning.Training(where, own, local_steps=steps, progress=progress_line(console))
    experiment = training.experiment(how, seed, hours)
    return replace(experiment, threads=os.cpu_count() or 1)


def loaded(run: Path | None) -> RunSpecification | None:
    from halos.specification import load_specification

    return None if run is None else load_specification(run)


def followed(experiment: Experiment, trace: Path | None, console: Console) -> Outcome:
    """Simulate to the end or to a signal, showing progress."""
    import torch

    from coordinator.progress import ShareBar
    from halos.simulation.experiment import run_experiment
    from halos.simulation.traced import run_traced

    torch.set_num_threads(1)  # the workers train side by side; and sums are the same everywhere
    stop = threading.Event()
    what = f"{experiment.method.name} on {experiment.environment.name}"
    with ShareBar(console, what) as bar, stopped_by_signals(stop.set):
        if trace is not None:
            return run_traced(experiment, trace, progress=bar.show, stop=stop)
        return run_experiment(experiment, progress=bar.show, stop=stop)


def print_outcome(outcome: Outcome, console: Console) -> None:
    from coordinator.view import curve

    if outcome.points:
        console.print(*curve(outcome.points), "", sep="\n", highlight=False)
    if not outcome.finished:
        console.print("Stopped before the end. What came of it until then:", highlight=False)
    console.print(told(outcome), highlight=False, soft_wrap=True)


def told(outcome: Outcome) -> str:
    """For a person."""
    from halos.simulation.units import BYTES, SECONDS, shown

    loss = outcome.final_loss
    stale, most = outcome.mean_staleness, outcome.max_staleness
    rows = [
        ("virtual time", shown(outcome.elapsed_s, SECONDS)),
        ("final loss", "" if loss is None else f"{loss:.3f} nats a token"),
        ("trained on", f"{outcome.tokens:,} tokens" if outcome.points else ""),
        ("local steps", f"{outcome.local_steps:,}"),
        ("workers computing", f"{outcome.utilization:.0%} of the time"),
        ("wide-area links", shown(outcome.wide_area_bytes, BYTES)),
        ("delivered", f"{outcome.delivered:.1%} of the work"),
        ("staleness", "" if stale is None else f"{stale:.1f} versions in the mean, at most {most}"),
    ]
    return "\n".join(f"{name:<18} {value}" for name, value in rows if value)


def print_list(console: Console, as_json: bool) -> None:
    from halos.simulation.environment import shipped
    from halos.simulation.methods import METHODS

    if as_json:
        print(json.dumps({"environments": shipped(), "methods": dict(METHODS)}))
        return
    for heading, entries in (("Environments", shipped()), ("Methods", METHODS)):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=True)
        for name, about in entries.items():
            table.add_row(name, about)
        console.print(f"{heading}:", table, "", sep="\n", highlight=False)
    console.print(
        "Settings of a method follow its name after colons: halos:k=4:in_flight=carry",
        highlight=False,
        soft_wrap=True,
    )
