"""``halos`` as a user starts it: a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from coordinator import cli
from halos.specification import load_specification

runner = CliRunner()


def halos(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("halos"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_init_writes_a_specification_that_loads(tmp_path: Path) -> None:
    done = halos("init", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "halos train run.toml" in done.stdout
    assert load_specification(tmp_path / "run.toml").run.name == "run"


def test_init_does_not_overwrite_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("mine")
    refused = halos("init", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "error: run.toml: exists already; give another name, or --force\n"
    assert (tmp_path / "run.toml").read_text() == "mine"
    assert halos("init", "--force", cwd=tmp_path).returncode == 0
    assert load_specification(tmp_path / "run.toml").run.name == "run"


def test_init_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refused = halos("init", "none/run.toml", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "error: none/run.toml: cannot be written: No such file or directory\n"


def test_the_run_is_named_after_the_file(tmp_path: Path) -> None:
    assert runner.invoke(cli.app, ["init", str(tmp_path / "my.paper.toml")]).exit_code == 0
    run = load_specification(tmp_path / "my.paper.toml").run
    assert (run.name, run.directory) == ("my-paper", tmp_path / "runs" / "my-paper")


def test_help_needs_no_torch() -> None:
    seen = "import sys, coordinator.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_help_lists_the_exit_codes() -> None:
    shown = runner.invoke(cli.app, ["--help"]).output
    assert "init" in shown and "130" in shown


def test_help_shows_all_that_is_written_of_each_command() -> None:
    """What stands in square brackets would be taken for markup, and left out."""

    def told(command: Any) -> Iterator[str]:
        yield command.help or ""
        yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
        for each in getattr(command, "commands", {}).values():
            yield from told(each)

    texts = list(told(typer.main.get_command(cli.app)))
    assert len(texts) > 50
    assert not [text for text in texts if Text.from_markup(text).plain != text]


def test_version() -> None:
    assert runner.invoke(cli.app, ["--version"]).output.startswith("halos ")


def ending_of(
    command: Callable[[], object], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> object:
    """The exit code of ``halos`` if ``command`` were all that it had."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["halos", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.run()
    return ended.value.code


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("[sync]\nlocal_step = 4", "[sync] local_step: no such field; did you mean local_steps"),
        ("[sync.local]\nrate = -1", "[sync.local] rate: -1 is not allowed; give a number greater"),
        ("[sync]\naccumulation = 0", "[sync] accumulation: 0 is not allowed; give a whole number"),
        ("[[regions]]\nworkers = 1", "[[regions]] number 1 name: is missing; give every region"),
    ],
)
def test_a_mistake_in_the_specification_is_one_line(
    mistake: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "a"\n[root]\nworkers = 1\n{mistake}\n')
    assert ending_of(lambda: load_specification(path), monkeypatch) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {path}: {said}")
    assert shown.err.count("\n") == 1


def test_an_interrupted_command_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert ending_of(interrupted, monkeypatch) == 130
    assert capsys.readouterr().err == ""


def test_a_mistake_in_the_command_ends_as_one_in_the_specification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ending_of(lambda: None, monkeypatch, "--fast") == 2


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(ZeroDivisionError):
        cli.run()
