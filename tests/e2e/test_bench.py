"""halos bench: it measures what it says, on a model too small to say much."""

from __future__ import annotations

import json

import pytest

from .conftest import Halos


@pytest.mark.slow
def test_an_exchange_is_measured_each_way_beside_raw_tcp(halos: Halos) -> None:
    done = halos("bench", "wire", "--parameters", "300000", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    first, *others = result["ways"]
    assert first["way"] == "raw TCP" and first["share_of_raw_tcp"] == 1
    assert len(others) == 4 and all(way["mb_per_s"] > 0 for way in others)
