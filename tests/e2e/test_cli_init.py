"""``halos`` as a user starts it: a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coordinator import cli
from halos.errors import UserError
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


def test_version() -> None:
    assert runner.invoke(cli.app, ["--version"]).output.startswith("halos ")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UserError("run.toml: no"), 2, "error: run.toml: no\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_command_ends(
    raised: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fails() -> None:
        raise raised

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["halos"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == said


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(ZeroDivisionError):
        cli.main()
