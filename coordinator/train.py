"""``halos train``: a whole run in this process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coordinator.process import stopped_by_signals

if TYPE_CHECKING:
    from halos.runtime.local import Beginning, LocalRun, Order

EXAMPLE = "Example: halos init run.toml && halos train run.toml"


def train(
    specification: Annotated[Path, typer.Argument(help="The run's TOML file; see `halos init`.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint.")
    ] = False,
    fixed_order: Annotated[
        bool,
        typer.Option(
            "--fixed-order", help="Events in an order that only depends on the specification."
        ),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write every event to this file, one JSON line each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train in this process: all servers, and a thread for every worker.

    Ctrl-C saves and leaves; --resume goes on from there.
    """
    from halos.runtime.local import open_run
    from halos.runtime.prepare import prepare
    from halos.specification import load_specification

    console = Console(stderr=as_json)
    prepared = prepare(load_specification(specification), progress_line(console))
    order: Order = "fixed" if fixed_order else "arrival"
    beginning: Beginning = "resume" if resume else "new"
    with open_run(prepared, order=order, beginning=beginning, trace=trace) as run:
        result = follow(run, console)
    if as_json:
        print(json.dumps(result))
    elif result["finished"]:
        console.print(told(result), highlight=False)
    else:
        again = f"halos train {specification} --resume" + (" --fixed-order" * fixed_order)
        console.print(
            f"Stopped and saved in {result['checkpoint']}. Go on with: {again}",
            highlight=False,
            soft_wrap=True,
        )


def follow(run: LocalRun, console: Console) -> dict[str, Any]:
    """Run to the end or to a signal, showing progress; then save. Returns the result as data."""
    from coordinator.view import RunView, curve
    from halos.runtime.status import status_of

    with RunView(console) as view, stopped_by_signals(run.stop):
        finished = run.run(tick=lambda: view.show(status_of(run), run.evaluator.points))
        view.show(status_of(run), run.evaluator.points)
    if not console.is_terminal:  # there the live table has shown it
        console.print(*curve(run.evaluator.points), sep="\n", highlight=False)
    checkpoint = run.save()
    result = {"finished": finished, "checkpoint": str(checkpoint), **asdict(status_of(run))}
    if finished:
        console.print("Evaluating on the whole validation set.")
        result["validation_loss"] = run.evaluator.whole(run.model)
    return result


def progress_line(console: Console) -> Any:
    """Says, once, that the data is being made."""
    said = False

    def progress(done: int, total: int) -> None:
        nonlocal said
        if not said:
            left = total - done
            console.print(f"Building the data set, once: {left} of {total} files to go.")
        said = True

    return progress


def told(result: dict[str, Any]) -> str:
    """The end of a finished run, for a person."""
    share, speed = result["computing_share"], result["tokens_per_s"]
    rows = [
        ("validation loss", f"{result['validation_loss']:.3f} nats a token"),
        ("trained on", f"{result['tokens']:,} tokens in {result['local_steps']:,} local steps"),
        ("speed", f"{speed:,.0f} tokens/s" if speed else ""),
        ("workers computing", f"{share:.0%} of the time" if share else ""),
        ("credited", f"{result['credited']:,} of {result['total']:,} samples"),
        ("delivered", f"{result['delivered']:,} ({result['delivered'] / result['total']:.1%})"),
        ("wide-area link", crossed(result.get("wide_area_bytes"))),
        ("checkpoint", result["checkpoint"]),
    ]
    return "\n".join(f"{name:<18} {value}" for name, value in rows if value)


def crossed(links: dict[str, dict[str, int]] | None) -> str:
    """Bytes over the emulated links of all regions, if there were any."""
    if not links:
        return ""
    up, down = (sum(link[way] for link in links.values()) / 1e6 for way in ("up", "down"))
    return f"{up:,.1f} MB up, {down:,.1f} MB down, over {len(links)} links"
