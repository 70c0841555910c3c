"""The example that sets a run beside its prediction, as the README starts it; shortened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_a_run_and_its_prediction_have_every_row(tmp_path: Path) -> None:
    text = (EXAMPLES / "rehearsal.toml").read_text()
    assert "local_steps_total = 6144" in text and '"../runs/rehearsal"' in text
    text = text.replace("6144", "768").replace("../runs/rehearsal", str(tmp_path / "run"))
    file = tmp_path / "rehearsal.toml"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, EXAMPLES / "rehearsal.py", file],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert head.startswith("a local step took ")
    assert [row.split("  ")[0] for row in rows[5:]] == ["wide-area links", "final loss"]
    assert len(rows) == 7 and all(row.startswith("to a loss of ") for row in rows[:5])
    assert all(row.endswith("%") for row in rows[5:])
