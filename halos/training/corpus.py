"""Text that every machine has without a download: the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from halos.errors import UserError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told (done, total) of something that takes a while."""

PROGRESS_AFTER_S = 2.0
VALIDATION_SHARE = 0.05
SEPARATOR = b"\0"
# Folders of tests, of what others installed, and of what was generated rather than written
# (encodings: tables of characters, which would teach little and make the validation easy).
LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)


def cache_folder() -> Path:
    """Where things are kept that can be made again: ``HALOS_CACHE``, else ``~/.cache/halos``."""
    chosen = os.environ.get("HALOS_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "halos"


def standard_library(progress: Progress | None = None) -> tuple[Path, Path]:
    """Files of bytes (train, validation), made on first use. Files do not straddle the two.

    ``progress`` hears of files done once that takes more than ``PROGRESS_AFTER_S``. Several
    processes may do this at once. Raises ``UserError`` if the interpreter has no sources or the
    cache no room.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = list_sources(root)
    if not sources:
        raise UserError(
            f"data.dataset is python-stdlib, but there are no Python sources in {root}: "
            "set data.train and data.validation to token files of your own"
        )
    folder = cache_folder() / f"python-stdlib-{platform.python_version()}-{_digest(root, sources)}"
    if not folder.exists():
        log.info("building %s from %d files of %s", folder, len(sources), root)
        try:
            build(root, sources, folder, progress)
        except OSError as error:
            raise UserError(
                f"the built-in text cannot be kept in {folder.parent}: {error.strerror}; set "
                "HALOS_CACHE to a folder with 20 MB to write to"
            ) from None
    return folder / "train.bin", folder / "validation.bin"


def list_sources(root: Path) -> list[str]:
    """Paths of the library's modules relative to ``root``, with slashes, sorted."""
    found = []
    for folder, below, files in os.walk(root):
        # Not even looked into: what others installed may be a hundred times as large.
        below[:] = [name for name in below if name not in LEFT_OUT]
        here = Path(folder).relative_to(root)
        found += [(here / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(source for source in found if not _generated(source))


def is_validation(source: str) -> bool:
    """Whether a file is held out: the same one whatever else there is."""
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big")
    return number < VALIDATION_SHARE * 2**32


def build(root: Path, sources: list[str], folder: Path, progress: Progress | None) -> None:
    """Write ``train.bin`` and ``validation.bin`` into ``folder``, both or neither."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with (
            (building / "train.bin").open("wb") as train,
            (building / "validation.bin").open("wb") as validation,
        ):
            for source in _told(sources, progress):
                out = validation if is_validation(source) else train
                out.write((root / source).read_bytes() + SEPARATOR)
            for file in (train, validation):
                file.flush()
                os.fsync(file.fileno())
        publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def publish(building: Path, folder: Path) -> None:
    """Give the finished folder its name, unless another process was first with the same content."""
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def content_hash(path: Path, token_type: str) -> str:
    """SHA-256 over the type of the tokens and all of them.

    Remembered in the cache by the file's size and time of change, since large files take minutes.
    """
    stat = path.stat()
    state = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "dtype": token_type}
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    sidecar = cache_folder() / "hashes" / f"{place}.json"
    try:
        known = json.loads(sidecar.read_text())
        if known["state"] == state:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not hashed yet, or unreadable: either way hash it now
    digest = hashlib.sha256(token_type.encode())
    with path.open("rb") as file:
        while chunk := file.read(2**24):
            digest.update(chunk)
    _remember(sidecar, {"state": state, "sha256": digest.hexdigest()})
    return digest.hexdigest()


def _remember(sidecar: Path, content: object) -> None:
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=sidecar.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        Path(temporary).replace(sidecar)
    except OSError as error:
        log.warning("cannot remember a data set's hash in %s: %s", sidecar, error)


def _generated(source: str) -> bool:
    return source.startswith(("_sysconfigdata", "config-"))


def _digest(root: Path, sources: list[str]) -> str:
    """Changes when a file comes, goes or changes its size."""
    listing = [(source, (root / source).stat().st_size) for source in sources]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:12]


def _told(sources: list[str], progress: Progress | None) -> Iterable[str]:
    tell_at = time.monotonic() + PROGRESS_AFTER_S
    for done, source in enumerate(sources, start=1):
        yield source
        if progress is not None and time.monotonic() >= tell_at:
            tell_at += 0.2
            progress(done, len(sources))
