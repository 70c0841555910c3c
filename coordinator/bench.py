"""``halos bench``: how fast the parts are on this machine."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.netem import settings_of
from coordinator.process import AsJson

if TYPE_CHECKING:
    from halos.runtime.codec_bench import Measured
    from halos.runtime.wire_bench import Way
    from halos.wire.link import LinkSettings

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    help="Measure parts of halos on this machine.",
)


@app.callback()
def bench() -> None:
    """Measure parts of halos on this machine."""


@app.command()
def wire(
    parameters: Annotated[
        int, typer.Option(min=1, help="Of the model that is exchanged, in fp32.")
    ] = 70_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Exchanges of each kind.")] = 5,
    rate_mbps: Annotated[
        float | None,
        typer.Option(help="Over an emulated network of so many Mbit/s each way."),
    ] = None,
    rtt_ms: Annotated[float, typer.Option(min=0, help="Its round trip in milliseconds.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Exchange a model over loopback, as a region and the coordinator do, beside raw TCP.

    There and back, between two processes. MB are of fp32 parameters, whatever the codec.

    Example: halos bench wire --parameters 10000000

    Example: halos bench wire --parameters 10000000 --rate-mbps 200 --rtt-ms 80
    """
    link = settings_of(rate_mbps, rtt_ms) if rate_mbps is not None or rtt_ms > 0 else None
    console = Console(stderr=as_json)
    with console.status("Starting"), ways() as chosen:
        found = []
        for way in chosen:
            console.print(f"{way.name}: {repeats} exchanges", highlight=False)
            found.append(measured(way, parameters, repeats, link))
    raw = found[0]["mb_per_s"]
    for row in found:
        row["share_of_raw_tcp"] = row["mb_per_s"] / raw
        if rate_mbps is not None:
            row["link_busy"] = row["bytes"] * 8 / row["seconds"] / (rate_mbps * 1e6)
    if as_json:
        print(json.dumps({"parameters": parameters, "repeats": repeats, "ways": found}))
        return
    console.print(table(parameters, found))


@app.command()
def codec(
    model: Annotated[
        str, typer.Option(help="Preset of the built-in model whose pseudo-gradient is encoded.")
    ] = "2m",
    steps: Annotated[int, typer.Option(min=1, help="That it is trained for before.")] = 40,
    as_json: AsJson = False,
) -> None:
    """Encode a real pseudo-gradient in every codec, on one core, beside a copy in memory.

    Codecs of hivemind and bitsandbytes stand beside ours where these are installed.

    Example: halos bench codec --model 0.1m
    """
    import torch

    from halos.runtime import codec_bench

    torch.set_num_threads(1)
    console = Console(stderr=as_json)
    with console.status(f"Training {model} for {steps} steps"):
        gradient = codec_bench.pseudo_gradient(model, steps)
    bench, found, missing = codec_bench.Bench(gradient), [], []
    with console.status("Measuring") as status:
        for name, codecs_of in codec_bench.WHOSE.items():
            try:
                for way in codecs_of():
                    status.update(f"Measuring {way.name}")
                    found.append(bench.measure(way))
            except ImportError:
                missing.append(name)
    if as_json:
        told = {"model": model, "parameters": len(gradient), "copy_mb_s": bench.copy_mb_s}
        codecs = [asdict(row) for row in found]
        print(json.dumps({**told, "missing": missing, "codecs": codecs}))
        return
    console.print(codec_table(model, len(gradient), bench.copy_mb_s, found))
    for name in missing:
        console.print(f"{name}: not installed, so not measured", highlight=False)


@app.command()
def server(
    parameters: Annotated[
        int, typer.Option(min=1, help="Of the model that is served, in fp32.")
    ] = 25_000_000,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="That push at once; give it again for more. 2, 8 and 32 else."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Updates of each worker.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Have workers push to a server all at once: its memory, which should not grow with them.

    Beside it, an outer step in GB/s of memory read and written, and a copy of the same arrays.

    Example: halos bench server --parameters 5000000 --workers 8
    """
    import torch

    from halos.runtime.server_bench import measure_apply, measure_server

    torch.set_num_threads(1)
    console = Console(stderr=as_json)
    with console.status("Measuring an outer step"):
        applied = measure_apply(parameters)
    found = []
    for count in workers or (2, 8, 32):
        with console.status(f"{count} workers push at once"):
            found.append(measure_server(parameters, count, rounds))
    model_mb = 4 * parameters / 1e6
    served = [
        asdict(one)
        | {"models_at_rest": (one.rest_mb - one.empty_mb) / model_mb}
        | {"models_at_peak": (one.peak_mb - one.empty_mb) / model_mb}
        for one in found
    ]
    if as_json:
        told = {"parameters": parameters, "rounds": rounds}
        print(json.dumps({**told, **asdict(applied), "servers": served}))
        return
    console.print(server_table(parameters, served))
    console.print(
        f"An outer step: {applied.apply_gb_s:.1f} GB/s; a copy: {applied.copy_gb_s:.1f} GB/s",
        highlight=False,
    )


def server_table(parameters: int, served: list[dict[str, Any]]) -> Table:
    title = (
        f"A server of {parameters:,} parameters ({4 * parameters / 1e6:,.0f} MB); its memory "
        "in models, above that of an empty process"
    )
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("workers", "updates/s", "at rest", "at most", "at most, MB in all"):
        shown.add_column(name, justify="right")
    for row in served:
        shown.add_row(
            str(row["workers"]),
            f"{row['updates_per_s']:.1f}",
            f"{row['models_at_rest']:.1f}",
            f"{row['models_at_peak']:.1f}",
            f"{row['peak_mb']:,.0f}",
        )
    return shown


def codec_table(model: str, parameters: int, copy: float, found: list[Measured]) -> Table:
    title = (
        f"A pseudo-gradient of {model} ({parameters:,} parameters), one core; a copy in memory: "
        f"{copy:,.0f} MB/s"
    )
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    shown.add_column("codec", no_wrap=True)
    speeds = ("encode MB/s", "of a copy", "decode MB/s", "of a copy")
    for name in (*speeds, "bytes each", "error", "cosine"):
        shown.add_column(name, justify="right")
    for row in found:
        shown.add_row(
            row.name,
            f"{row.encode_mb_s:,.0f}",
            f"{row.encode_of_copy:.2f}",
            f"{row.decode_mb_s:,.0f}",
            f"{row.decode_of_copy:.2f}",
            f"{row.bytes_a_parameter:.3f}",
            f"{row.error:.4f}",
            f"{row.cosine:.5f}",
        )
    return shown


def measured(way: Way, parameters: int, repeats: int, link: LinkSettings | None) -> dict[str, Any]:
    """Median and spread of the exchanges after a first one, which is not counted."""
    from halos.runtime.wire_bench import exchange

    with exchange(way, parameters, link) as once:
        once()
        seconds = [once() for _ in range(repeats)]
    megabytes = 2 * 4 * parameters / 1e6
    return {
        "way": way.name,
        "seconds": statistics.median(seconds),
        "slowest_s": max(seconds),
        "fastest_s": min(seconds),
        "mb_per_s": megabytes / statistics.median(seconds),
        "bytes": 2 * way.bytes_of(parameters),
    }


@contextmanager
def ways() -> Iterator[list[Way]]:
    """Raw TCP first, then what others would do, then ours in several codecs, also encrypted."""
    from halos.runtime.wire_bench import Way
    from halos.wire.certificates import issue, make_authority

    with tempfile.TemporaryDirectory() as folder:
        certs = Path(folder)
        make_authority(certs / "authority")
        issue(certs / "authority", certs / "coordinator", "coordinator", "coordinator")
        issue(certs / "authority", certs / "server", "server", "region")
        yield [
            Way("raw TCP", "tcp"),
            Way("plain protobuf over gRPC", "protobuf"),
            Way("halos, fp32"),
            Way("halos, bf16", codec="bf16"),
            Way("halos, int8", codec="int8"),
            Way("halos, int4", codec="int4"),
            Way("halos with mutual TLS, fp32", certs=certs),
            Way("halos with mutual TLS, bf16", codec="bf16", certs=certs),
        ]


def table(parameters: int, found: list[dict[str, Any]]) -> Table:
    title = f"{parameters:,} parameters, there and back ({8 * parameters / 1e6:,.0f} MB)"
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    shown.add_column("way", no_wrap=True)
    busy = ["link busy"] if "link_busy" in found[0] else []
    for name in ("median s", "fastest", "slowest", "MB/s", "of raw TCP", *busy):
        shown.add_column(name, justify="right")
    for row in found:
        times = (f"{row[name]:.2f}" for name in ("seconds", "fastest_s", "slowest_s"))
        share = f"{row['share_of_raw_tcp']:.0%}"
        used = [f"{row['link_busy']:.0%}"] if busy else []
        shown.add_row(row["way"], *times, f"{row['mb_per_s']:,.0f}", share, *used)
    return shown
