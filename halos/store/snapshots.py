"""Snapshots on disk: whole or not there, the newest good one found again, one writer a folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from halos.errors import UserError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
SUMS = "SHA256SUMS"  # as sha256sum(1) writes and checks them


@dataclass(frozen=True)
class Snapshot:
    """What :func:`write` was given, read back."""

    path: Path
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for one writer. Raises ``UserError`` when another process holds it.

    The lock goes with the process that holds it, however that ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); give another run.directory"
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder}: this run directory is in use by process {file.read().strip()}; stop "
                "that run first, or give this one another run.directory"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def write(
    folder: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], *, keep: int
) -> Path:
    """Write a snapshot into ``folder`` under the next number; remove all but the last ``keep``.

    It appears under its name only once all of it is on disk. Raises ``UserError`` when the disk
    is full or may not be written; snapshots from before stay.
    """
    earlier = numbered(folder)
    path = folder / f"{int(earlier[-1].name) + 1 if earlier else 1:08d}"
    building = folder / f".building-{path.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".building-*"):
            shutil.rmtree(leftover)
        building.mkdir()
        save_file({key: t.contiguous() for key, t in tensors.items()}, building / TENSORS)
        (building / MANIFEST).write_text(json.dumps(manifest))
        files = [building / TENSORS, building / MANIFEST]
        (building / SUMS).write_text("".join(f"{_digest(f)}  {f.name}\n" for f in files))
        for file in (*files, building / SUMS, building):
            _sync(file)
        building.rename(path)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise UserError(
            f"{folder}: the checkpoint cannot be written ({error}); make room there, or set "
            "run.directory to another disk, and resume from the last one"
        ) from error
    for old in numbered(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def newest(folder: Path) -> Snapshot:
    """The newest snapshot that is whole; a line of warning for each newer one that is not.

    Raises ``UserError`` when there is none.
    """
    for path in reversed(numbered(folder)):
        try:
            lines = set((path / SUMS).read_text().splitlines())
            for name in (TENSORS, MANIFEST):
                if f"{_digest(path / name)}  {name}" not in lines:
                    raise ValueError(f"{name} is not what was written")
            manifest = json.loads((path / MANIFEST).read_text())
            return Snapshot(path, manifest, load_file(path / TENSORS))
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("%s is damaged (%s): taking the one before", path, error)
    raise UserError(f"{folder}: there is no checkpoint here; train without --resume first")


def numbered(folder: Path) -> list[Path]:
    """The snapshots of a folder, oldest first."""
    return sorted(
        path
        for path in folder.glob("[0-9]" * 8)
        if any((path / file).is_file() for file in (MANIFEST, TENSORS, SUMS))
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
