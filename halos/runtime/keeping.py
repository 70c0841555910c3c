"""What a process keeps in a directory of its own: how often it started, and its state."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halos.errors import UserError
from halos.runtime.capture import Capture
from halos.runtime.control import ADDRESS
from halos.store import snapshots

log = logging.getLogger(__name__)

STARTS = "starts"


class Keeping:
    """Snapshots of one process, taken every ``every_s`` seconds. Use :func:`kept_in`."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], every_s: float, keep: int) -> None:
        self.folder = folder
        self.starts = _count_start(folder)
        self._facts = dict(facts)
        self._every_s = every_s
        self._keep = keep
        self._saved_at = time.monotonic()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Path] | None = None

    def saved(self) -> Capture | None:
        """The newest state, or ``None`` at the first start. ``UserError`` if it is another's."""
        if not snapshots.numbered(self.checkpoints):
            return None
        snapshot = snapshots.newest(self.checkpoints)
        then = snapshot.manifest.get("facts", {})
        for name, now in self._facts.items():
            if then.get(name) != now:
                raise UserError(
                    f"{snapshot.path}: this is of a run with another {name}; go on with it by what "
                    "it was begun with, or give another directory"
                )
        return Capture(snapshot.manifest, snapshot.tensors)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def save_if_due(self, capture: Callable[[], Capture]) -> None:
        """Begin a snapshot in the background, when it is time and none is being written."""
        if self._writing is not None:
            if not self._writing.done():
                return
            if error := self._writing.exception():
                log.warning("%s", error)
            self._writing = None
        if time.monotonic() >= self._saved_at + self._every_s:
            self._saved_at = time.monotonic()
            self._writing = self._writer.submit(self._write, capture())

    def save(self, capture: Callable[[], Capture]) -> Path:
        """Write a snapshot now, and wait for it. ``UserError`` if it cannot be written."""
        if self._writing is not None:
            self._writing.exception()
        return self._write(capture())

    def announce(self, address: str) -> None:
        """Write down where this process listens, for those on this machine who look for it."""
        beside = self.folder / f".{ADDRESS}"
        beside.write_text(f"{address}\n")
        beside.rename(self.folder / ADDRESS)

    def close(self) -> None:
        self._writer.shutdown(wait=True)
        (self.folder / ADDRESS).unlink(missing_ok=True)

    def _write(self, state: Capture) -> Path:
        manifest = {"facts": self._facts, **state.manifest}
        return snapshots.write(self.checkpoints, manifest, state.tensors, keep=self._keep)


@contextmanager
def kept_in(
    folder: Path, facts: Mapping[str, Any], *, every_s: float, keep: int
) -> Iterator[Keeping]:
    """Hold ``folder`` for this process alone. ``UserError`` when another holds it."""
    with snapshots.locked(folder):
        keeping = Keeping(folder, facts, every_s, keep)
        try:
            yield keeping
        finally:
            keeping.close()


def _count_start(folder: Path) -> int:
    """Which start of this directory's process this is, from 1; on disk before it is used.

    No fence of an earlier start is issued again, whatever else was lost.
    """
    file = folder / STARTS
    try:
        earlier = json.loads(file.read_text()) if file.exists() else 0
        beside = folder / f".{STARTS}"
        with beside.open("w") as out:
            out.write(json.dumps(earlier + 1))
            out.flush()
            os.fsync(out.fileno())
        beside.rename(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: cannot be read and written ({error}); mend or remove it"
        ) from error
    return int(earlier) + 1
