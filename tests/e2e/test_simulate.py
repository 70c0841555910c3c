"""halos simulate and halos compare, as a user starts them."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from pathlib import Path

import pytest

from .conftest import Halos, command

PLACE = """
name = "place"
step_ms = 100
model_bytes = 1000000
root_region = "us"
bandwidth_gbps = [[10.0, 0.1], [0.1, 10.0]]

[[regions]]
name = "us"
workers = [1.0, 0.5]

[[regions]]
name = "eu"
workers = [1.0]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place.toml"
    path.write_text(PLACE)
    return path


def test_what_there_is_is_listed_with_a_line_each(halos: Halos) -> None:
    done = halos("simulate", "--list")
    assert done.returncode == 0, done.stderr
    for name in ("paper-4x4", "two-clouds", "fast", "paper", "diloco-dynamic"):
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 3


def test_the_list_is_there_for_scripts(halos: Halos) -> None:
    told = json.loads(halos("simulate", "--list", "--json").stdout)
    assert "paper-4x4" in told["environments"] and "fast" in told["methods"]


def test_time_alone_the_same_trace_byte_for_byte(halos: Halos, tmp_path: Path) -> None:
    for name in ("once", "again"):
        done = halos(
            "simulate", "paper-4x4", "--timing-only", "--steps", "600", "--json", "--trace", name
        )
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        assert outcome["finished"] and outcome["local_steps"] >= 600
        assert outcome["final_loss"] is None
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes() != b""


def test_hours_end_a_run(halos: Halos) -> None:
    done = halos("simulate", "paper-4x4", "--timing-only", "--hours", "0.05", "--json")
    assert json.loads(done.stdout)["elapsed_s"] == 180


@pytest.mark.usefixtures("small", "place")
def test_a_specification_of_ones_own_is_trained(halos: Halos) -> None:
    done = halos("simulate", "place.toml", "--run", "run.toml")
    assert done.returncode == 0, done.stderr
    said = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line.strip())
    assert "nats a token" in said["final loss"]
    assert "100%" not in done.stderr
    assert int(said["local steps"]) >= 60  # of the specification


@pytest.mark.usefixtures("small")
def test_a_run_of_ones_own_is_simulated_as_it_is(halos: Halos) -> None:
    done = halos("simulate", "--run", "run.toml", "--step-ms", "50", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["environment"], outcome["method"]) == ("small", "small")
    assert outcome["finished"] and outcome["final_loss"] < outcome["points"][0]["loss"]
    # Three equal workers or fewer share 60 steps of 50 ms.
    assert 60 * 0.05 / 3 <= outcome["elapsed_s"] <= 60 * 0.05


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    asked = ("simulate", "paper-4x4", "--timing-only", "--steps", "100000000")
    with subprocess.Popen(
        command(*asked), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first line of progress
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0
    assert "Stopped before the end." in rest
    assert "virtual time" in rest


@pytest.mark.usefixtures("small", "place")
def test_methods_are_compared_and_what_is_there_is_taken_up(
    halos: Halos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("compare", "place.toml", "--methods", "fast,diloco", "--seeds", "1")
    asked += ("--run", "run.toml", "--jobs", "2")
    done = halos(*asked)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "compare-place"
    assert {path.name for path in folder.iterdir()} == {
        "outcomes",
        "report.json",
        "report.csv",
        "loss-over-time.png",
        "loss-over-tokens.png",
        "timeline-fast.png",
        "timeline-diloco.png",
    }
    heads = [line.split(" ")[0] for line in done.stdout.splitlines()]
    rows = [head for head in heads if head in ("fast", "diloco")]
    assert rows == ["fast", "diloco"]
    with (folder / "report.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == rows
    outcomes = {path: path.stat().st_mtime_ns for path in (folder / "outcomes").iterdir()}
    assert len(outcomes) == 2

    # Again, on a machine without matplotlib: nothing is computed, and the tables are written.
    for path in folder.glob("*.*"):
        path.unlink()
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "matplotlib.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    again = halos(*asked, "--json", "--target-loss", "0.001")
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert (told["target_loss"], told["partial"]) == (0.001, False)
    assert [row["reached"] for row in told["rows"]] == [0, 0]
    assert 'pip install "halos[report]"' in again.stderr
    assert {path.name for path in folder.iterdir()} == {"outcomes", "report.json", "report.csv"}
    assert outcomes == {path: path.stat().st_mtime_ns for path in (folder / "outcomes").iterdir()}


@pytest.mark.usefixtures("small", "place")
def test_ctrl_c_keeps_what_is_finished_and_reports_that(halos: Halos, tmp_path: Path) -> None:
    asked = ("compare", "place.toml", "--methods", "fast,diloco", "--seeds", "1", "--to", "kept")
    asked += ("--run", "run.toml", "--jobs", "1")
    with subprocess.Popen(
        command(*asked), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "1 finished" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0
    assert "A partial report: 1 of 2 runs were finished." in rest
    assert len(list((tmp_path / "kept" / "outcomes").glob("*.json"))) == 1
    told = json.loads((tmp_path / "kept" / "report.json").read_text())
    assert told["partial"] and [row["method"] for row in told["rows"]] == ["fast"]


@pytest.mark.usefixtures("small", "place")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("simulate", "ENV: is missing"),
        ("simulate --run run.toml", "ENV: is missing"),
        ("simulate place.toml --step-ms 3", "--step-ms 3: an ENV has its own"),
        ("simulate --run run.toml --step-ms 0", "--step-ms 0: is not allowed"),
        ("simulate paper-4x5", "environment paper-4x5: is neither a file nor"),
        ("simulate place.toml --method fats", "method fats: there is no such method; did you mean"),
        ("simulate place.toml --method halos:k=0", "halos:k=0: k: "),
        ("simulate place.toml --hours 0", "--hours 0: is not allowed"),
        ("simulate place.toml --timing-only --hours inf", "--hours inf: is not allowed"),
        ("compare place.toml --target-loss 0", "--target-loss 0: is not allowed"),
        ("simulate place.toml --run none.toml", "none.toml: there is no such file"),
        ("simulate place.toml --run run.toml --timing-only", "--run run.toml: has no use with"),
        ("simulate place.toml --timing-only --method diloco --trace t", "--trace t: method diloco"),
        ("simulate place.toml --timing-only --trace no/t", "--trace no/t: cannot be written"),
        ("compare place.toml --methods fast,fast", "--methods: fast is there twice"),
        ("compare place.toml --methods fast,,paper", "method : there is no such method"),
        ("compare place.toml --run run.toml --to run.toml", "--to run.toml: cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(halos: Halos, asked: str, said: str) -> None:
    done = halos(*asked.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
