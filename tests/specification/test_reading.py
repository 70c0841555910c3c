"""Every mistake in a specification is one sentence that names the place and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halos.errors import UserError
from halos.specification import load_specification

GOOD = """
[run]
name = "test"
[[regions]]
name = "us"
workers = 2
[[regions]]
name = "eu"
workers = 1
"""

MISTAKES = {
    # what is wrong: (in the specification above, replaced by; what is said after the file's name)
    "unknown section": ("[run]", "[rum]\n[run]", "[rum]: no such section; did you mean [run]?"),
    "unknown field": ("[run]", "[run]\nsed = 1", "[run] sed: no such field; did you mean seed?"),
    "unknown field, nothing close": (
        "[run]",
        "[run]\ncolour = 1",
        "[run] colour: no such field; there are name, seed, directory",
    ),
    "unknown table of sync": (
        "[run]",
        "[sync.globl]\n[run]",
        "[sync] globl: no such field; did you mean global or local?",
    ),
    "misspelt name of a region": (
        'name = "eu"',
        'nmae = "eu"',
        "[[regions]] number 2 nmae: no such field; did you mean name?",
    ),
    "region without a name": (
        'name = "eu"',
        "",
        '[[regions]] number 2 name: is missing; give every region a name, such as name = "eu"',
    ),
    "empty name": (
        'name = "eu"',
        'name = ""',
        '[[regions]] number 2 name: "" is not allowed; give a name without dots and slashes',
    ),
    "slash in a name": (
        'name = "eu"',
        'name = "eu/west"',
        '[[regions]] "eu/west" name: "eu/west" is not allowed; give a name without dots',
    ),
    "two of a name": ('"eu"', '"us"', '[[regions]] "us" name: is taken; give another'),
    "the root's name": ('"eu"', '"root"', '[[regions]] "root" name: is taken; give another'),
    "unknown parent": (
        '"eu"',
        '"eu"\nparent = "asia"',
        '[[regions]] "eu" parent: there is no region "asia"; give one of us',
    ),
    "its own parent": (
        '"eu"',
        '"eu"\nparent = "eu"',
        '[[regions]] "eu" parent: "eu" is below "eu"; a tree has no loop',
    ),
    "negative rate": (
        "[run]",
        "[sync.global]\nrate = -0.1\n[run]",
        "[sync.global] rate: -0.1 is not allowed; give a number greater than 0",
    ),
    "K of 0": (
        "[run]",
        "[sync]\naccumulation = 0\n[run]",
        "[sync] accumulation: 0 is not allowed; give a whole number of at least 1",
    ),
    "half a K": (
        "[run]",
        "[sync]\naccumulation = 1.5\n[run]",
        "[sync] accumulation: 1.5 is not allowed; give a whole number",
    ),
    "infinite rate": (
        "[run]",
        "[sync.local]\nrate = inf\n[run]",
        "[sync.local] rate: inf is not allowed; give a finite number",
    ),
    "a word for a number": (
        "[run]",
        '[sync.local]\nrate = "fast"\n[run]',
        '[sync.local] rate: "fast" is not allowed; give a number',
    ),
    "a number for a name": (
        'name = "eu"',
        "name = 7",
        "[[regions]] number 2 name: 7 is not allowed; give a text in quotes",
    ),
    "not one of a choice": (
        "[run]",
        '[sync]\nin_flight = "keep"\n[run]',
        "[sync] in_flight: \"keep\" is not allowed; give 'drop' or 'carry'",
    ),
    "not a table": (
        "\n[run]",
        "sync = 3\n[run]",
        "[sync]: 3 is not allowed; give a table",
    ),
    "negative workers": (
        "workers = 1",
        "workers = -1",
        '[[regions]] "eu" workers: -1 is not allowed; give a whole number of at least 0',
    ),
    "speed of 0": (
        "workers = 1",
        "workers = [1.0, 0.0]",
        '[[regions]] "eu" workers, item 2: 0.0 is not allowed; give a number greater than 0',
    ),
    "workers neither number nor list": (
        "workers = 1",
        "workers = true",
        '[[regions]] "eu" workers: true is not allowed; give a list',
    ),
    "rate of a link": (
        "[run]",
        "[link]\nrate_mbps = 0\n[run]",
        "[link] rate_mbps: 0 is not allowed; give a number greater than 0",
    ),
    "round trip of one region's link": (
        "workers = 1",
        "workers = 1\nlink = { rtt_ms = -1 }",
        '[[regions]] "eu" link rtt_ms: -1 is not allowed; give a number of at least 0',
    ),
    "both lengths": (
        "[run]",
        "[training]\nepochs = 2\nlocal_steps_total = 10\n[run]",
        "[training] epochs: 2 is given beside local_steps_total = 10; keep one of the two",
    ),
    "time-out shorter than two heartbeats": (
        "[run]",
        "[membership]\nheartbeat_interval_s = 20\n[run]",
        "[membership] heartbeat_timeout_s: 30 is not allowed; give more than twice",
    ),
    "no name": (
        'name = "test"',
        "",
        '[run] name: is missing; give the run a name, such as name = "first"',
    ),
    "no section [run]": (
        '[run]\nname = "test"',
        "",
        '[run]: is missing; give a section [run] with name = "..."',
    ),
    "unknown preset of a model": (
        "[run]",
        '[model]\npreset = "huge"\n[run]',
        "[model] preset: there is no 'huge'; the presets are",
    ),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "runs.toml"
    path.write_text(text)
    return path


def complaint(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_specification(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "Error" not in message and "pydantic" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_one_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert complaint(write(tmp_path, GOOD.replace(old, new, 1))).startswith(said)


def test_what_the_mistakes_start_from_is_good(tmp_path: Path) -> None:
    load_specification(write(tmp_path, GOOD))


def test_nobody_to_train(tmp_path: Path) -> None:
    said = complaint(write(tmp_path, re.sub(r"workers = \d", "workers = 0", GOOD)))
    assert said == "[[regions]] workers: there are none; give at least one worker"


def test_a_loop_of_regions(tmp_path: Path) -> None:
    loop = GOOD.replace('"us"', '"us"\nparent = "eu"').replace(
        'name = "eu"', 'name="eu"\nparent="us"'
    )
    assert complaint(write(tmp_path, loop)) == (
        '[[regions]] "us" parent: "eu" is below "us"; a tree has no loop'
    )


def test_one_table_where_several_may_stand(tmp_path: Path) -> None:
    said = complaint(write(tmp_path, '[run]\nname = "a"\n[regions]\nname = "us"\nworkers = 1'))
    assert said.startswith("[regions]: ") and said.endswith("give tables: [[regions]]")


def test_a_line_that_is_not_toml(tmp_path: Path) -> None:
    said = complaint(write(tmp_path, "[run]\nname = \n"))
    assert said.startswith("is not valid TOML: ") and "line 2" in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.toml") == "there is no such file; `halos init` writes one"


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    assert complaint(tmp_path) == "cannot be read: Is a directory"


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x02")
    assert complaint(path) == "is not text in UTF-8 (byte 0)"
