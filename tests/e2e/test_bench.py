"""halos bench: it measures what it says, on a model too small to say much."""

from __future__ import annotations

import json

import pytest

from .conftest import Halos


@pytest.mark.slow
def test_every_codec_is_measured_on_a_real_pseudo_gradient(halos: Halos) -> None:
    done = halos("bench", "codec", "--model", "0.1m", "--steps", "20", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    by_name = {row["name"]: row for row in result["codecs"]}
    assert result["parameters"] == 123_200
    assert by_name["int4+zstd"]["bytes_a_parameter"] <= 0.5
    assert by_name["int2+zstd"]["bytes_a_parameter"] <= 0.27
    assert by_name["topk+zstd"]["bytes_a_parameter"] <= 0.2
    assert by_name["fp32"]["error"] == 0 < by_name["int8"]["error"] < by_name["int4"]["error"]


@pytest.mark.slow
def test_an_exchange_is_measured_each_way_beside_raw_tcp(halos: Halos) -> None:
    done = halos("bench", "wire", "--parameters", "300000", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    first, *others = result["ways"]
    assert first["way"] == "raw TCP" and first["share_of_raw_tcp"] == 1
    assert len(others) == 7 and all(way["mb_per_s"] > 0 for way in others)


@pytest.mark.slow
def test_a_servers_memory_is_measured_with_workers_pushing_at_once(halos: Halos) -> None:
    sizes = ("--parameters", "3000000", "--workers", "2", "--workers", "6", "--rounds", "2")
    done = halos("bench", "server", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [server["workers"] for server in result["servers"]] == [2, 6]
    for server in result["servers"]:
        assert server["updates_per_s"] > 0
        assert 3 <= server["models_at_rest"] < server["models_at_peak"]
    assert result["apply_gb_s"] > 0 < result["copy_gb_s"]
