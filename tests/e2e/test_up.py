"""A whole run as processes on this machine: TLS, emulated links, a stop amid training, the rest."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halos.runtime.control import announced, status_of_server
from halos.runtime.saved import load_saved
from halos.wire.security import Security

from .conftest import Halos, command, wait_for

LINK = """
[link]
rate_mbps = 100
rtt_ms = 20
"""
END_S = 280
pytestmark = pytest.mark.timeout(2 * END_S)


def asked(folder: Path, address: str) -> dict[str, Any]:
    """What the coordinator says of the run."""
    security = Security.from_folder(folder / "certs" / "operator")
    told: dict[str, Any] = status_of_server(address, security)
    return told


@pytest.mark.smoke
def test_a_run_of_processes_over_slow_links_stops_amid_training_and_goes_on_to_its_end(
    halos: Halos, small: Path
) -> None:
    text = small.read_text().replace("local_steps_total = 60", "local_steps_total = 3000")
    small.write_text(text + LINK)
    folder = small.parent / "runs" / "small"
    with subprocess.Popen(
        command("up", "run.toml", "--tls"), cwd=small.parent, stdout=subprocess.PIPE, text=True
    ) as up:
        address = wait_for(lambda: announced(folder))
        wait_for(lambda: asked(folder, address)["credited"] > 0)
        up.send_signal(signal.SIGINT)
        output, _ = up.communicate(timeout=END_S)
    assert up.returncode == 0 and "Stopped and saved" in output
    assert announced(folder) is None, "no process is left that could be asked"
    books = load_saved(folder).counts
    assert 0 < books["credited"] < 6000

    done = halos("up", "run.toml", "--tls", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["finished"] and result["credited"] == result["total"] == 6000
    assert result["local_steps"] >= 3000 and result["validation_loss"] < 5.0
    for region in ("us", "eu"):
        assert result["wide_area_bytes"][region]["up"] > 10_000
    losses = (folder / "loss.jsonl").read_text().splitlines()
    assert losses, "the observer's evaluations are kept"
    assert halos("eval", str(folder)).returncode == 0
