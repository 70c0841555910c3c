"""``halos certs``: what it writes, what it says, and how it refuses."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.certs import app
from halos.errors import UserError
from halos.wire.roles import ROLES
from halos.wire.security import Security, check_listen

runner = CliRunner()


def halos_certs(*arguments: object) -> str:
    done = runner.invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    halos_certs("init", tmp_path / "authority")
    return tmp_path / "authority"


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALOS_TOKEN", raising=False)


def test_init_says_what_it_wrote_and_what_comes_next(tmp_path: Path) -> None:
    said = halos_certs("init", tmp_path / "authority")
    assert "Wrote ca.pem, ca-key.pem, token, token.sha256 in" in said
    assert f"halos certs issue {tmp_path / 'authority'} --role coordinator" in said
    assert (tmp_path / "authority" / "token").read_text().strip() not in said


def test_init_as_json(tmp_path: Path) -> None:
    result = json.loads(halos_certs("init", tmp_path / "authority", "--json"))
    assert result["folder"] == str(tmp_path / "authority")
    assert {Path(file) for file in result["files"]} == set((tmp_path / "authority").iterdir())


@pytest.mark.parametrize("role", ROLES)
def test_what_issue_writes_is_what_a_process_reads(
    authority: Path, tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    to = tmp_path / "certs" / role
    said = halos_certs("issue", authority, "--role", role, "--name", "a-1", "--to", to)
    assert f"{role} a-1, valid until" in said
    assert f"--certs {to}" in said
    security = Security.from_folder(to)
    assert (security.role, security.name) == (role, "a-1")
    assert not caplog.records
    if role in {"coordinator", "server"}:
        check_listen("0.0.0.0:7443", security, insecure=False)
        assert security.token_hash is not None


def test_one_authority_s_token_opens_its_servers(authority: Path, tmp_path: Path) -> None:
    for role in ("coordinator", "worker"):
        halos_certs("issue", authority, "--role", role, "--to", tmp_path / role)
    worker = Security.from_folder(tmp_path / "worker")
    assert Security.from_folder(tmp_path / "coordinator").admits(worker.metadata())


def test_issue_as_json(authority: Path, tmp_path: Path) -> None:
    to = tmp_path / "eu"
    options = ("--role", "server", "--to", to, "--host", "eu.example", "--host", "10.0.0.7")
    result = json.loads(halos_certs("issue", authority, *options, "--days", 30, "--json"))
    assert (result["role"], result["name"], result["folder"]) == ("server", "server", str(to))
    assert {Path(file) for file in result["files"]} == set(to.iterdir())
    left = datetime.fromisoformat(result["valid_until"]) - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)


def test_what_is_there_is_replaced_only_by_force(authority: Path, tmp_path: Path) -> None:
    options = ("issue", authority, "--role", "worker", "--to", tmp_path / "w")
    halos_certs(*options)
    before = Security.from_folder(tmp_path / "w")
    with pytest.raises(UserError, match="--force"):
        halos_certs(*options)
    assert Security.from_folder(tmp_path / "w") == before
    halos_certs(*options, "--force")
    assert Security.from_folder(tmp_path / "w") != before


@pytest.mark.parametrize(
    "options",
    [("--role", "boss"), ("--role", "worker", "--days", "0"), ()],
)
def test_a_mistake_in_the_command_ends_with_two(
    authority: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = runner.invoke(app, ["issue", str(authority), "--to", str(tmp_path / "x"), *options])
    assert done.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_an_authority_is_never_overwritten(authority: Path) -> None:
    before = {path: path.read_bytes() for path in authority.iterdir()}
    with pytest.raises(UserError, match="never overwritten"):
        halos_certs("init", authority)
    assert {path: path.read_bytes() for path in authority.iterdir()} == before


@pytest.mark.parametrize("command", ["init", "issue"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: halos certs {command}" in runner.invoke(app, [command, "--help"]).stdout


def test_no_secret_is_logged(
    authority: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = halos_certs("issue", authority, "--role", "server", "--to", tmp_path / "s")
    token = (authority / "token").read_text().strip()
    Security.from_folder(tmp_path / "s")
    assert token not in said + caplog.text
