from __future__ import annotations

import os
import sysconfig
import threading
from pathlib import Path

import pytest

from halos.errors import UserError
from halos.training import corpus


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Forty modules, and what must not be among them."""
    root = tmp_path / "lib"
    (root / "package").mkdir(parents=True)
    for i in range(40):
        (root / "package" / f"m{i:02}.py").write_text(f"number = {i}\n")
    for name in ("test/a.py", "package/tests/b.py", "site-packages/c.py", "encodings/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left out\n")
    (root / "_sysconfigdata_x.py").write_text("left out\n")
    (root / "config-3.11-x").mkdir()
    (root / "config-3.11-x" / "python-config.py").write_text("left out\n")
    (root / "package" / "data.txt").write_text("left out\n")
    return root


def test_only_what_somebody_wrote_is_in_it(root: Path) -> None:
    assert corpus.list_sources(root) == [f"package/m{i:02}.py" for i in range(40)]


def test_a_file_is_either_trained_on_or_held_out(root: Path, tmp_path: Path) -> None:
    sources = corpus.list_sources(root)
    corpus.build(root, sources, tmp_path / "built", None)
    parts = {
        name: (tmp_path / "built" / f"{name}.bin").read_bytes().split(corpus.SEPARATOR)[:-1]
        for name in ("train", "validation")
    }
    held_out = [source for source in sources if corpus.is_validation(source)]
    assert 0 < len(held_out) < 10
    assert parts["validation"] == [(root / source).read_bytes() for source in held_out]
    assert sorted(parts["train"] + parts["validation"]) == sorted(
        (root / source).read_bytes() for source in sources
    )


def test_the_split_of_a_file_depends_on_its_name_only() -> None:
    share = sum(corpus.is_validation(f"{i}.py") for i in range(10_000)) / 10_000
    assert share == pytest.approx(corpus.VALIDATION_SHARE, rel=0.1)
    assert corpus.is_validation("abc.py") == corpus.is_validation("abc.py")


def test_builders_at_the_same_time_leave_one_whole_corpus(root: Path, tmp_path: Path) -> None:
    sources, folder = corpus.list_sources(root), tmp_path / "built"
    together = threading.Barrier(4)
    failures = []

    def build() -> None:
        together.wait()
        try:
            corpus.build(root, sources, folder, None)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(p.name for p in folder.iterdir()) == ["train.bin", "validation.bin"]
    assert [p.name for p in tmp_path.iterdir() if "built" in p.name] == ["built"]


def test_a_build_that_fails_leaves_nothing(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        corpus.build(root, ["package/m00.py", "gone.py"], tmp_path / "built", None)
    assert [p.name for p in tmp_path.iterdir()] == ["lib"]


def test_a_long_build_tells_how_far_it_is(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    sources = corpus.list_sources(root)
    corpus.build(root, sources, tmp_path / "quick", lambda done, total: told.append((done, total)))
    monkeypatch.setattr(corpus, "PROGRESS_AFTER_S", -1000.0)
    corpus.build(root, sources, tmp_path / "slow", lambda done, total: told.append((done, total)))
    assert told == [(done, 40) for done in range(1, 41)]


def test_the_standard_library_is_built_once() -> None:
    train, validation = corpus.standard_library()
    assert train.stat().st_size > 3_000_000
    assert 0.01 < validation.stat().st_size / train.stat().st_size < 0.15
    made = train.stat().st_mtime_ns
    assert corpus.standard_library() == (train, validation)
    assert train.stat().st_mtime_ns == made
    assert (Path(sysconfig.get_path("stdlib")) / "abc.py").read_bytes() in train.read_bytes()


def test_an_interpreter_without_sources_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=r"set data\.train and data\.validation"):
        corpus.standard_library()


def test_a_cache_that_cannot_be_written_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder can be made below this")
    monkeypatch.setenv("HALOS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be kept in .*file: .*; set HALOS_CACHE"):
        corpus.standard_library()


def test_a_hash_is_of_content_and_type_and_is_remembered(tmp_path: Path) -> None:
    one, same = tmp_path / "one.bin", tmp_path / "same.bin"
    one.write_bytes(b"abcd")
    same.write_bytes(b"abcd")
    assert corpus.content_hash(one, "uint8") == corpus.content_hash(same, "uint8")
    assert corpus.content_hash(one, "uint8") != corpus.content_hash(one, "uint16")

    first, state = corpus.content_hash(one, "uint8"), one.stat()
    one.write_bytes(b"abce")
    os.utime(one, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert corpus.content_hash(one, "uint8") == first, "same size and time: not read again"
    os.utime(one, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert corpus.content_hash(one, "uint8") != first


def test_a_hash_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.bin"
    path.write_bytes(b"abcd")
    wanted = corpus.content_hash(path, "uint8")
    for sidecar in (corpus.cache_folder() / "hashes").iterdir():
        sidecar.write_text("[]")
    assert corpus.content_hash(path, "uint8") == wanted
    blocked = tmp_path / "file"
    blocked.write_text("no folder can be made below this")
    monkeypatch.setenv("HALOS_CACHE", str(blocked))
    assert corpus.content_hash(path, "uint8") == wanted
