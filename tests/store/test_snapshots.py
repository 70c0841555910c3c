"""Snapshots are whole or not there."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halos.errors import UserError
from halos.store import snapshots

KILLED_AMID_SAVES = """
import os, random, signal, sys
from pathlib import Path
import torch
from halos.store import snapshots

def save_for_ever(folder, number, ready):
    while True:
        number += 1
        tensors = {str(k): torch.full((50_000,), float(number)) for k in range(4)}
        os.write(ready, b".")
        snapshots.write(folder, {"number": number}, tensors, keep=3)

torch.set_num_threads(1)
folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
last = 0
for _ in range(kills):
    told, ready = os.pipe()
    writer = os.fork()
    if writer == 0:
        save_for_ever(folder, last, ready)
    for _ in range(chance.randrange(2, 6)):
        os.read(told, 1)
    for _ in range(chance.randrange(100_000)):
        pass  # some moment of the save that has just begun
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    os.close(told), os.close(ready)
    snapshot = snapshots.newest(folder)
    number = snapshot.manifest["number"]
    assert number >= max(last, 1), (number, last)
    assert all(torch.equal(t, torch.full_like(t, number)) for t in snapshot.tensors.values())
    assert len(snapshots.numbered(folder)) <= 4
    last = number
print("killed", kills)
"""


def write(folder: Path, number: int, keep: int = 3) -> Path:
    return snapshots.write(folder, {"number": number}, {"x": torch.full((4,), number)}, keep=keep)


def test_the_newest_is_read_back_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, number)
    assert [path.name for path in snapshots.numbered(tmp_path)] == [
        "00000003",
        "00000004",
        "00000005",
    ]
    snapshot = snapshots.newest(tmp_path)
    assert snapshot.manifest == {"number": 4}
    assert torch.equal(snapshot.tensors["x"], torch.full((4,), 4))


@pytest.mark.parametrize("file", [snapshots.MANIFEST, snapshots.TENSORS, snapshots.SUMS])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_one_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    for number in range(2):
        write(tmp_path, number)
    path = tmp_path / "00000002" / file
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with caplog.at_level(logging.WARNING):
        assert snapshots.newest(tmp_path).manifest == {"number": 0}
    (record,) = caplog.records
    assert "00000002" in record.getMessage()


def test_without_any_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        snapshots.newest(tmp_path)


def test_a_disk_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path, 0)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        write(blocked / "checkpoints", 1)
    assert snapshots.newest(tmp_path).manifest == {"number": 0}


def test_one_writer_a_folder(tmp_path: Path) -> None:
    with (
        snapshots.locked(tmp_path),
        pytest.raises(UserError, match="in use by process"),
        snapshots.locked(tmp_path),
    ):
        pass
    with snapshots.locked(tmp_path):
        pass  # free again


@pytest.mark.parametrize(("kills", "seed"), [(20, 0), pytest.param(300, 1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_a_save_leaves_a_good_snapshot(
    tmp_path: Path, kills: int, seed: int
) -> None:
    command = [sys.executable, "-c", KILLED_AMID_SAVES, str(tmp_path), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == f"killed {kills}\n", done.stderr
    write(tmp_path, 0)
    assert not list(tmp_path.glob(".building-*"))


def test_a_folder_that_cannot_be_written_to_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(UserError, match="cannot be written to"),
        snapshots.locked(tmp_path / "file" / "run"),
    ):
        pass
