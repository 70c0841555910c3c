"""Environments: those that ship, mistakes in others, speeds that vary, how long things take."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halos.core.messages import (
    Assignment,
    Heartbeat,
    Push,
    PushAnswer,
    Report,
    Resumed,
    WorkerUpdate,
)
from halos.core.samples import Lease
from halos.core.tensors import NOTHING
from halos.core.topology import ROOT
from halos.errors import UserError
from halos.simulation.circumstances import Variation
from halos.simulation.environment import Environment, EnvironmentModel, shipped
from halos.simulation.pace import Pace
from tests.simulation.facts import production

TOML = """
name = "tried"
step_ms = 1000
model_bytes = 125_000_000
root_region = "us"
bandwidth_gbps = [[100.0, 0.5], [0.5, 100.0]]
latency_ms = 40

[[regions]]
name = "us"
workers = [1.0, 0.5]

[[regions]]
name = "eu"
workers = 2

[[variations]]
who = "eu/*"
schedule = [[100, 0.5], [200, 1.0]]

[[events]]
at_s = 600
kind = "kill"
who = "us/1"

[[outages]]
kind = "cut"
who = "*"
every_s = 1000
lasting_s = 30
"""


def environment(old: str = "", new: str = "", *, folder: Path) -> Environment:
    """The one above with ``old`` replaced."""
    assert old in TOML
    path = folder / "tried.toml"
    path.write_text(TOML.replace(old, new, 1) if old else TOML)
    return Environment.load(str(path))


@pytest.fixture
def tried(tmp_path: Path) -> Environment:
    return environment(folder=tmp_path)


# ---------------------------------------------------------------- those that ship


def test_what_ships_is_described_in_a_line_each() -> None:
    assert sorted(shipped()) == ["flaky-spot", "paper-4x4", "ten-regions", "two-clouds"]
    for name, description in shipped().items():
        assert 20 < len(description) < 110 and "\n" not in description
        assert Environment.load(name).name == name


def test_they_are_listed_and_read_without_torch() -> None:
    code = (
        "import sys; from halos.simulation.environment import Environment, shipped\n"
        "[Environment.load(name) for name in shipped()]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_two_clouds() -> None:
    two = Environment.load("two-clouds")
    assert [len(region.workers) for region in two.regions] == [8, 8]
    assert all(len(set(region.workers)) == 2 for region in two.regions)
    assert two.bandwidth_gbps is not None and two.bandwidth_gbps[0][1] == 1.0
    assert 2 * two.latency_ms == 80


def test_ten_regions_are_unlike_and_the_same_distance_apart_both_ways() -> None:
    ten = Environment.load("ten-regions")
    assert len(ten.regions) == 10
    assert len({len(region.workers) for region in ten.regions}) >= 5
    assert ten.bandwidth_gbps is not None
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    between = [ten.bandwidth_gbps[a][b] for a, b in pairs]
    assert (min(between), max(between)) == (0.1, 2.0)
    for a, b in pairs:
        assert ten.bandwidth_gbps[a][b] == ten.bandwidth_gbps[b][a]
        assert ten.latency_s(a, b) == ten.latency_s(b, a) > 0
        assert ten.latency_s(a, a) == 0


def test_only_the_flaky_one_needs_heartbeats() -> None:
    assert [name for name in shipped() if Environment.load(name).has_faults] == ["flaky-spot"]


# ---------------------------------------------------------------- mistakes

MISTAKES = {
    "not square": (
        "[[100.0, 0.5], [0.5, 100.0]]",
        "[[100.0, 0.5], [0.5]]",
        (
            "bandwidth_gbps: a matrix of 2 by 1 or 2 is not allowed; "
            "give 2 rows of 2 numbers, one for each region"
        ),
    ),
    "not of the regions": (
        "[[100.0, 0.5], [0.5, 100.0]]",
        "[[1, 1, 1], [1, 1, 1], [1, 1, 1]]",
        (
            "bandwidth_gbps: a matrix of 3 by 3 is not allowed; "
            "give 2 rows of 2 numbers, one for each region"
        ),
    ),
    "latencies not square": (
        "latency_ms = 40",
        "latency_ms = [[0, 40]]",
        (
            "latency_ms: a matrix of 1 by 2 is not allowed; "
            "give 2 rows of 2 numbers, one for each region"
        ),
    ),
    "a bandwidth of 0": (
        "[0.5, 100.0]]",
        "[0, 100.0]]",
        "bandwidth_gbps, item 2, item 1: 0 is not allowed; give a number greater than 0",
    ),
    "a speed of 0": (
        "[1.0, 0.5]",
        "[1.0, 0]",
        '[[regions]] "us" workers, item 2: 0 is not allowed; give a number greater than 0',
    ),
    "a negative number": (
        "step_ms = 1000",
        "step_ms = -1",
        "step_ms: -1 is not allowed; give a number greater than 0",
    ),
    "a negative latency": (
        "latency_ms = 40",
        "latency_ms = -40",
        "latency_ms: -40 is not allowed; give a number of at least 0",
    ),
    "a negative latency in a matrix": (
        "latency_ms = 40",
        "latency_ms = [[0, 40], [-40, 0]]",
        "latency_ms, item 2, item 1: -40 is not allowed; give a number of at least 0",
    ),
    "a negative number of workers": (
        "workers = 2",
        "workers = -2",
        '[[regions]] "eu" workers: -2 is not allowed; give a list',
    ),
    "nobody at all": (
        "[1.0, 0.5]",
        '[]\n[[regions]]\nname = "ap"\nworkers = 0',
        (
            "bandwidth_gbps: a matrix of 2 by 2 is not allowed; "
            "give 3 rows of 3 numbers, one for each region"
        ),
    ),
    "an unknown root region": (
        'root_region = "us"',
        'root_region = "usa"',
        'root_region: "usa" is no region; did you mean us?',
    ),
    "a region twice": (
        'name = "eu"',
        'name = "us"',
        'regions: "us" is there twice; give each a name of its own',
    ),
    "a region named as nodes are": (
        'name = "eu"',
        'name = "eu.members"',
        (
            '[[regions]] "eu.members" name: "eu.members" is not allowed; '
            "give a name without any of / . * ? [ ], other than root"
        ),
    ),
    "an unknown worker in an event": (
        'who = "us/1"',
        'who = "us/2"',
        '[[events]] number 1 who: "us/2" is nobody to whom this can happen; did you mean us/1?',
    ),
    "the server of no region": (
        'who = "us/1"',
        'who = "mars"',
        (
            '[[events]] number 1 who: "mars" is nobody to whom this can happen; '
            "there are us, eu, us/0, us/1, eu/0, eu/1"
        ),
    ),
    "a region that joins": (
        'kind = "kill"\nwho = "us/1"',
        'kind = "join"\nwho = "us"',
        '[[events]] number 1 who: "us" is nobody to whom this can happen; did you mean us/1?',
    ),
    "the link of the root's own region": (
        'who = "*"',
        'who = "us"',
        '[[outages]] number 1 who: "us" is nobody to whom this can happen; did you mean us/1?',
    ),
    "the speed of a region": (
        'who = "eu/*"',
        'who = "eu"',
        '[[variations]] number 1 who: "eu" is nobody to whom this can happen; did you mean eu/1?',
    ),
    "a schedule that goes back": (
        "[[100, 0.5], [200, 1.0]]",
        "[[200, 0.5], [100, 1.0]]",
        "[[variations]] number 1 schedule: 100 comes after 200; give ascending times",
    ),
    "a schedule that stops": (
        "[[100, 0.5]",
        "[[100, 0]",
        (
            "[[variations]] number 1 schedule, item 1, item 2: 0 is not allowed; "
            "give a number greater than 0"
        ),
    ),
    "an unknown kind": (
        'kind = "kill"',
        'kind = "die"',
        (
            "[[events]] number 1 kind: \"die\" is not allowed; give 'kill', 'return', 'join', "
            "'leave', 'cut' or 'mend'"
        ),
    ),
    "an unknown field": (
        "step_ms",
        "steps_ms",
        "steps_ms: no such field; did you mean step_ms?",
    ),
    "an unknown field of a region": (
        "workers = 2",
        "worker = 2",
        '[[regions]] "eu" worker: no such field; did you mean workers?',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, tmp_path: Path) -> None:
    old, new, expected = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        environment(old, new, folder=tmp_path)
    assert str(caught.value) == f"{tmp_path / 'tried.toml'}: {expected}"


def test_somebody_has_to_work(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text('name="e"\nstep_ms=1\nroot_region="us"\n[[regions]]\nname="us"\nworkers=0')
    with pytest.raises(UserError, match="regions: none has a worker; give one of them at least"):
        Environment.load(str(path))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("paper-4x3", "did you mean paper-4x4?"),
        ("elsewhere.toml", "there are flaky-spot, paper-4x4, ten-regions, two-clouds"),
    ],
)
def test_an_unknown_environment(name: str, hint: str) -> None:
    expected = (
        f"environment {name}: is neither a file nor an environment that ships with halos; {hint}"
    )
    with pytest.raises(UserError) as caught:
        Environment.load(name)
    assert str(caught.value) == expected


# ---------------------------------------------------------------- speeds


def model(environment: Environment, **given: Any) -> EnvironmentModel:
    return EnvironmentModel(environment, environment.tree(), **given)


@pytest.mark.parametrize(
    ("now", "seconds"),
    [
        (50, 8),  # all before
        (92, 8),  # ends as it gets slower
        (96, 12),  # half of it while it is slow
        (120, 16),  # all while it is slow
        (196, 10),  # two steps while it is slow
        (200, 8),
    ],
)
def test_a_round_takes_as_long_as_the_speed_on_its_way_allows(
    now: float, seconds: float, tried: Environment
) -> None:
    assert model(tried).compute_s("eu/0", 8, now) == pytest.approx(seconds)
    assert model(tried).compute_s("us/0", 8, now) == pytest.approx(8)


@given(
    pieces=st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 3)), max_size=6),
    now=st.floats(0, 200),
    work_s=st.floats(0.01, 500),
)
def test_the_work_of_a_round_is_its_speed_over_its_time(
    pieces: list[tuple[float, float]], now: float, work_s: float
) -> None:
    schedule, at = [], 0.0
    for length, factor in pieces:
        schedule.append((at, factor))
        at += length
    pace = Pace.of("w", [Variation(who="w", schedule=tuple(schedule))], seed=0)
    end = now + pace.seconds(work_s, now)
    ends = [start for start, _ in schedule[1:]] + [math.inf]
    done = sum(
        max(0.0, min(end, until) - max(now, start)) * factor
        for (start, factor), until in zip(schedule or [(0.0, 1.0)], ends, strict=True)
    )
    assert done == pytest.approx(work_s, rel=1e-9, abs=1e-9)


def test_variations_of_the_same_worker_hold_together() -> None:
    pace = Pace.of(
        "eu/0",
        [
            Variation(who="eu/*", schedule=((10, 0.5), (30, 1.0))),
            Variation(who="eu/0", schedule=((20, 0.1),)),
        ],
        seed=0,
    )
    assert [pace.seconds(1e-3, at) for at in (0, 10, 20, 30)] == pytest.approx(
        [1e-3, 2e-3, 2e-2, 1e-2]
    )


ROUNDS = [1.7 * i for i in range(4_000)]  # when they start


def varied(sigma: float = 0.3, seed: int = 5, worker: str = "eu/0") -> Pace:
    return Pace.of(worker, [Variation(who=worker, sigma=sigma)], seed)


def test_random_speeds_are_log_normal_about_the_constant_one() -> None:
    pace = varied()
    logs = [math.log(pace.seconds(8.0, at) / 8.0) for at in ROUNDS]
    assert fmean(logs) == pytest.approx(0.0, abs=4 * 0.3 / math.sqrt(len(logs)))
    assert stdev(logs) == pytest.approx(0.3, rel=0.05)
    assert fmean(a * b for a, b in itertools.pairwise(logs)) < 0.05 * 0.3**2


def test_they_depend_on_seed_worker_and_start_alone() -> None:
    forward = [varied().seconds(8.0, at) for at in ROUNDS[:50]]
    backward = [varied().seconds(8.0, at) for at in reversed(ROUNDS[:50])]
    assert forward == backward[::-1]
    assert len({*forward}) == 50
    assert not {*forward} & {varied(seed=6).seconds(8.0, at) for at in ROUNDS[:50]}
    assert not {*forward} & {varied(worker="eu/1").seconds(8.0, at) for at in ROUNDS[:50]}


def test_the_seed_is_the_models(tried: Environment) -> None:
    shaky = tried.model_copy(update={"variations": (Variation(who="*/*", sigma=0.2),)})
    times = [model(shaky, seed=seed).compute_s("us/1", 8, 3.0) for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


# ---------------------------------------------------------------- transfers

LEASE = Lease("l", "text", 0, ((0, 8),), 0)
UPDATE = WorkerUpdate("l", 1, 0, 8, 8, 0.0, 0.0, 0.0, NOTHING)
ASSIGNMENT = Assignment(1, 1, None, LEASE, 8, 1, 0, NOTHING)
PUSH = Push(1, 1, 0, Report(), NOTHING)
ANSWER = PushAnswer(1, 1, 1, NOTHING)


def resumed(*, reset: bool, model: bool) -> Resumed:
    return Resumed(1, 1, 1, reset, 1, NOTHING if model else None)


def test_a_model_takes_bytes_over_bandwidth_plus_latency(tried: Environment) -> None:
    """A gigabit at half a gigabit a second, 40 ms away; and at 100 inside a region."""
    times = model(tried)
    assert times.transfer_s("eu", ROOT, PUSH) == pytest.approx(2.04)
    assert times.transfer_s(ROOT, "eu", ANSWER) == pytest.approx(2.04)
    assert times.transfer_s("eu/0", "eu", UPDATE) == pytest.approx(0.01)
    assert times.transfer_s("us", ROOT, PUSH) == pytest.approx(0.01)
    assert times.transfer_s("eu.session", "root.members", Heartbeat(1)) == pytest.approx(0.04)
    assert times.transfer_s("eu/0.session", "eu.members", Heartbeat(1)) == 0
    assert times.transfer_s(ROOT, "eu", resumed(reset=False, model=False)) == pytest.approx(0.04)


def test_latencies_may_be_a_matrix(tmp_path: Path) -> None:
    apart = environment("latency_ms = 40", "latency_ms = [[1, 30], [50, 2]]", folder=tmp_path)
    times = model(apart)
    assert times.transfer_s("eu", ROOT, PUSH) == pytest.approx(2.05)
    assert times.transfer_s(ROOT, "eu", ANSWER) == pytest.approx(2.03)
    assert times.transfer_s("eu/0", "eu", UPDATE) == pytest.approx(0.012)
    assert apart.latency_ms == 50


def test_compressed_links_weigh_and_take_less(tried: Environment) -> None:
    times = model(tried, up_ratio=0.125, down_ratio=0.25)
    assert times.transfer_s("eu", ROOT, PUSH) == pytest.approx(0.04 + 2 / 8)
    assert times.size_bytes("eu", ROOT, PUSH) == 125_000_000 / 8
    for message in (ANSWER, resumed(reset=False, model=True)):
        assert times.transfer_s(ROOT, "eu", message) == pytest.approx(0.04 + 2 / 4)
        assert times.size_bytes(ROOT, "eu", message) == 125_000_000 / 4


def test_after_a_reset_the_model_comes_whole(tried: Environment) -> None:
    times = model(tried, up_ratio=0.125, down_ratio=0.25)
    assert times.size_bytes(ROOT, "eu", resumed(reset=True, model=True)) == 125_000_000
    assert times.size_bytes(ROOT, "eu", resumed(reset=True, model=False)) == 0


def test_only_what_crosses_between_regions_is_counted(tried: Environment) -> None:
    times = model(tried)
    assert times.size_bytes("eu", ROOT, PUSH) == 125_000_000
    assert times.size_bytes("us", ROOT, PUSH) == 0
    assert times.size_bytes("eu", "eu/0", ASSIGNMENT) == 0
    assert times.size_bytes("eu.session", "root.members", Heartbeat(1)) == 0
    star = EnvironmentModel(tried, tried.star())
    assert star.size_bytes(ROOT, "eu/0", ASSIGNMENT) == 125_000_000
    assert star.size_bytes("us/0", ROOT, UPDATE) == 0


# ---------------------------------------------------------------- whole runs, timing only


def worked(*sizes: int, slow: str | None = None) -> dict[str, int]:
    """How many rounds the workers of each region were given, of which all but the last ended."""
    environment = Environment.model_validate(
        {
            "name": "unequal",
            "step_ms": 100,
            "model_bytes": 1_000_000,
            "root_region": "r0",
            "regions": [{"name": f"r{i}", "workers": size} for i, size in enumerate(sizes)],
            "bandwidth_gbps": [[1.0] * len(sizes)] * len(sizes),
            "variations": [{"who": slow, "schedule": [(0, 0.25)]}] if slow else [],
        }
    )
    topology = environment.tree()
    facts = production(environment, topology, local_steps=4, accumulation=8, total=4_000)
    assert facts.steps >= 4_000
    assert {kind for kind, *_ in facts.events} == {"gps", "merge"}
    names = [worker.parent for worker in topology.workers]
    rounds = dict.fromkeys((region.name for region in environment.regions), 0)
    for worker, *_ in facts.leases:
        rounds[names[worker]] += 1
    return rounds


def test_unequal_regions_work_in_proportion() -> None:
    rounds = worked(1, 3, 8)
    assert rounds["r1"] / rounds["r0"] == pytest.approx(3, rel=0.1)
    assert rounds["r2"] / rounds["r0"] == pytest.approx(8, rel=0.1)


def test_a_region_without_workers_keeps_nobody_waiting() -> None:
    assert worked(2, 0, 2)["r1"] == 0
    assert worked(0, 3)["r0"] == 0


def test_a_single_region() -> None:
    assert worked(4)["r0"] >= 1_000


def test_a_region_that_is_slowed_down_does_less() -> None:
    rounds = worked(3, 3, slow="r1/*")
    assert rounds["r1"] / rounds["r0"] == pytest.approx(0.25, rel=0.1)
