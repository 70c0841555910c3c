"""Training, and what comes after it, through the command line."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from halos.training.export import load_exported

from .conftest import Halos, command


def test_train_then_evaluate_generate_and_export(halos: Halos, small: Path, tmp_path: Path) -> None:
    done = halos("train", "run.toml", "--json", "--trace", "trace.jsonl")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["finished"]
    assert (result["credited"], result["total"]) == (120, 120)
    assert 0 < result["delivered"] <= 120
    assert {r["name"] for r in result["regions"]} == {"us", "eu"}

    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert set(events[0]) == {"run"}
    assert {"time", "node", "event", "effects", "version", "staleness"} == set(events[1])
    updates = [e for e in events[1:] if e["event"].get("message", {}).get("type") == "WorkerUpdate"]
    assert sum(e["event"]["message"]["tokens"] for e in updates) == 120 * 16

    evaluated = halos("eval", "runs/small", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["validation_loss"] == pytest.approx(
        result["validation_loss"], abs=1e-5
    )

    generated = halos("generate", "runs/small", "--prompt", "def f", "--count", "20", "--json")
    assert generated.returncode == 0, generated.stderr
    assert json.loads(generated.stdout)["prompt"] == "def f"
    assert json.loads(generated.stdout)["text"]

    exported = halos("export", "runs/small", "--to", "exported")
    assert exported.returncode == 0, exported.stderr
    model = load_exported(tmp_path / "exported")
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in load_file(tmp_path / "exported" / "model.safetensors")

    again = halos("train", "run.toml")
    assert again.returncode == 2
    assert "there is a run in this directory already" in again.stderr


@pytest.fixture
def heedful() -> Iterator[None]:
    """Processes started here hear of a closed terminal, even where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heedful")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_leaves_and_resume_goes_on(
    halos: Halos, small: Path, tmp_path: Path, number: signal.Signals
) -> None:
    small.write_text(small.read_text().replace("= 60", "= 1200"))
    with subprocess.Popen(
        command("train", "run.toml"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first line of progress: it trains
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0
    assert "Stopped and saved in" in rest
    assert "--resume" in rest

    resumed = halos("train", "run.toml", "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads(resumed.stdout)
    assert result["finished"]
    assert result["credited"] == result["total"] == 2_400


def test_a_run_directory_has_one_user(halos: Halos, small: Path, tmp_path: Path) -> None:
    small.write_text(small.read_text().replace("= 60", "= 100000"))
    with subprocess.Popen(
        command("train", "run.toml"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        second = halos("train", "run.toml")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert second.returncode == 2
    assert f"in use by process {process.pid}" in second.stderr
    assert second.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("[sync]", "[sync]\nacumulation = 3", "[sync] acumulation: no such field; did you mean"),
        ("[inner]", "[inner]\nlearning_rate = -1", "[inner] learning_rate: -1 is not allowed"),
        ("accumulation = 2", "accumulation = 0", "[sync] accumulation: 0 is not allowed"),
        ('name = "eu"', "", "name: is missing"),
        ('"train.bin"', '"gone.bin"', "gone.bin"),
        ("sequence_length = 16", "sequence_length = 50000", "data.sequence_length + 1 = 50001"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    halos: Halos, small: Path, before: str, after: str, said: str
) -> None:
    small.write_text(small.read_text().replace(before, after))
    done = halos("train", "run.toml")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_checkpoint_of_another_model_is_refused(halos: Halos, small: Path) -> None:
    assert halos("train", "run.toml", "--json").returncode == 0
    small.write_text(small.read_text().replace("width = 16", "width = 24"))
    done = halos("train", "run.toml", "--resume")
    assert done.returncode == 2
    assert "another [model]" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.smoke
def test_the_demo_trains_on_the_standard_library(halos: Halos) -> None:
    done = halos("demo", "--steps", "240", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["finished"]
    assert result["credited"] == result["total"] == 240 * 8
    assert result["validation_loss"] < 5.0  # it began at 5.5, the logarithm of 256
    assert 2.3 < result["bigram_loss"] < 2.6
    assert len(result["text"]) > 100
    assert halos("demo", "--steps", "24", "--json").returncode == 0  # replaces the first
