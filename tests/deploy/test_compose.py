"""deploy/ holds what it promises, short of being run, which is what `make compose` is for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from coordinator.cli import app
from halos.specification import load_specification
from halos.wire.identity import read_certificates
from halos.wire.roles import parse_name

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
REGIONS = ("us", "eu", "ap")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")

Service = dict[str, Any]


def settings() -> dict[str, str]:
    """What .env sets."""
    lines = (DEPLOY / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def topology() -> dict[str, Any]:
    text = VARIABLE.sub(lambda found: settings()[found[1]], COMPOSE.read_text())
    loaded: dict[str, Any] = YAML(typ="safe").load(text)
    return loaded


@pytest.fixture(scope="module")
def services(topology: dict[str, Any]) -> dict[str, Service]:
    found: dict[str, Service] = topology["services"]
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that prepare.sh makes; here it stands for the container's root."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "config").mkdir()
    script = re.sub(r"(/certs|/config)/", rf"{folder}\1/", (DEPLOY / "prepare.sh").read_text())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | settings() | {"PATH": path}
    for _ in range(2):  # once more changes nothing, and is no mistake
        subprocess.run(["sh", "-c", script], env=environment, check=True)
    return folder


def parse(arguments: list[str]) -> None:
    """Have the real parser read a command line, without carrying it out."""
    command: Any = typer.main.get_command(app)
    context, name = None, "halos"
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not hasattr(command, "get_command"):
            return
        name, *arguments = [*context._protected_args, *context.args]
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name}"


def command_lines(services: dict[str, Service]) -> Iterator[list[str]]:
    for service in services.values():
        if "command" in service:
            yield service["command"]
        if "healthcheck" in service:
            kind, program, *arguments = service["healthcheck"]["test"]
            assert (kind, program) == ("CMD", "halos")
            yield arguments


def option(service: Service, name: str) -> str:
    """What the service's command line gives an option."""
    command: list[str] = service["command"]
    return command[command.index(name) + 1]


def of_kind(services: dict[str, Service], kind: str) -> dict[str, Service]:
    return {name: service for name, service in services.items() if name.startswith(f"{kind}-")}


def test_the_file_is_of_the_compose_schema() -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [program, "--builtin-schema", "vendor.compose-spec", COMPOSE]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_command_line_parses(services: dict[str, Service]) -> None:
    lines = list(command_lines(services))
    assert len(lines) >= len(services)
    for line in lines:
        parse(line)


def test_a_command_line_that_is_wrong_does_not_parse() -> None:
    with pytest.raises(Exception, match="--regoin"):
        parse(["server", "--regoin", "us", "--join", "root:1"])


def test_every_variable_is_set_in_env_and_every_setting_is_of_use() -> None:
    used = set(VARIABLE.findall(COMPOSE.read_text()))
    assert used | {"COMPOSE_PROJECT_NAME"} == settings().keys()


def test_what_prepare_needs_is_handed_to_it(services: dict[str, Service]) -> None:
    script = (DEPLOY / "prepare.sh").read_text()
    needed = {name for name in VARIABLE.findall(script) if name.startswith("HALOS_")}
    assert services["prepare"]["environment"].keys() == needed


def test_the_specification_is_one_of_three_regions_of_two_unequal_workers(
    prepared: Path, services: dict[str, Service]
) -> None:
    specification = load_specification(prepared / "config" / "run.toml")
    assert tuple(region.name for region in specification.regions) == REGIONS
    names = {worker.name for worker in specification.workers}
    assert names == {option(s, "--name") for s in of_kind(services, "worker").values()}
    for region in REGIONS:
        fast, slow = (services[f"worker-{region}-{index}"]["cpus"] for index in (0, 1))
        assert float(fast) > float(slow)


def test_every_process_has_a_certificate_of_its_role_and_cannot_read_that_of_another(
    prepared: Path, services: dict[str, Service]
) -> None:
    for name, service in services.items():
        if name == "prepare" or service["command"][0] == "netem":
            continue
        folder = option(service, "--certs")
        certificate = read_certificates(prepared / folder.lstrip("/") / "cert.pem", "")[0]
        role, _ = parse_name(certificate.subject.rfc4514_string().removeprefix("CN=")) or ("", "")
        expected = service["command"][0]
        assert role == (expected if expected in ("coordinator", "server", "worker") else "operator")
        mounted = [v for v in service["volumes"] if "/certs" in v]
        assert mounted == [f"certs-{role}:/certs/{role}:ro"]


def test_only_netem_stands_between_a_region_and_the_coordinator(
    topology: dict[str, Any], services: dict[str, Service]
) -> None:
    assert all(network == {"internal": True} for network in topology["networks"].values())
    on = {
        network: {n for n, service in services.items() if network in service.get("networks", ())}
        for network in topology["networks"]
    }
    assert on["root"] == {
        "coordinator",
        "evaluator",
        "operator",
        *(f"netem-{region}" for region in REGIONS),
    }
    for region in REGIONS:
        server, netem = f"server-{region}", f"netem-{region}"
        workers = {f"worker-{region}-{index}" for index in (0, 1)}
        assert on[region] == {server} | workers
        assert on[f"wan-{region}"] == {server, netem}
        assert option(services[server], "--join") == f"{netem}:7443"
        assert {option(services[worker], "--join") for worker in workers} == {f"{server}:7443"}
    assert on.keys() == {"root", *REGIONS, *(f"wan-{region}" for region in REGIONS)}


def test_what_stops_gets_the_time_to_save_and_what_fails_is_started_again(
    services: dict[str, Service],
) -> None:
    for name, service in services.items():
        assert service["stop_grace_period"] == "60s"
        assert service["restart"] == ("no" if name in ("prepare", "operator") else "on-failure")
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    serving = {"coordinator", *of_kind(services, "server")}
    assert {name for name, service in services.items() if "healthcheck" in service} == serving


def test_what_must_survive_a_restart_is_in_a_declared_volume(
    topology: dict[str, Any], services: dict[str, Service]
) -> None:
    named = [
        volume.split(":")
        for service in services.values()
        for volume in service.get("volumes", ())
        if not volume.startswith("./")
    ]
    assert {volume for volume, *_ in named} == topology["volumes"].keys()
    written = [volume for volume, place, *mode in named if place == "/runs" and mode != ["ro"]]
    assert len(written) == len(set(written))  # none is written by two
    keeping = [n for n, s in services.items() if s.get("command", [""])[0] in ("server", "worker")]
    for name in keeping:
        assert option(services[name], "--directory").startswith("/runs/")


def test_the_image_runs_halos_itself_as_an_ordinary_user() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert lines[-1] == 'ENTRYPOINT ["halos"]'
    assert "USER 10001:10001" in lines
    assert "VOLUME /runs" in lines


@pytest.mark.parametrize("script", ["run.sh", "prepare.sh"])
def test_scripts_are_read_by_their_shell(script: str) -> None:
    path = DEPLOY / script
    shell = path.read_text().splitlines()[0].split("/")[-1].split()[-1]
    subprocess.run([shell, "-n", path], check=True)
    assert os.access(path, os.X_OK)


def test_without_an_engine_the_script_says_what_to_install() -> None:
    refused = subprocess.run(
        [DEPLOY / "run.sh"],
        env=os.environ | {"HALOS_ENGINE": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: no container engine works here: install docker")
    assert refused.stderr.count("\n") == 1
