"""Regions may hold different data: a lease names its data set, and the root balances (DESIGN 5)."""

from __future__ import annotations

import pytest

from halos.core.messages import Assignment, Drain, Grant, MemberLost
from halos.core.samples import Block
from halos.core.server import Server
from tests.core.builders import (
    finished,
    found,
    join_region,
    join_worker,
    meet_parent,
    only,
    receive,
    region_server,
    request_of,
    root_server,
    sent,
    tell,
)


@pytest.fixture
def root() -> Server:
    """Data set a is 0 to 600, b is 600 to 1000; eu has a, us has b, ap has both."""
    root = root_server({"a": 600, "b": 400})
    for fence, (name, datasets) in enumerate(
        {"eu": ("a",), "us": ("b",), "ap": ("a", "b")}.items(), start=1
    ):
        join_region(root, name, fence=fence, datasets=datasets)
    return root


def ask(root: Server, name: str, number: int, samples: int) -> Grant | None:
    fence = root.state.leasing.children[name].fence or 0
    grants = found(receive(root, name, request_of(number, samples, fence=fence)), Grant, name)
    return grants[0] if grants else None


def granted(root: Server, name: str, number: int, samples: int) -> set[str]:
    grant = ask(root, name, number, samples)
    assert grant is not None
    return {block.dataset for block in grant.blocks}


def test_a_region_gets_only_samples_that_it_has(root: Server) -> None:
    for i in range(1, 6):
        assert granted(root, "eu", i, 20) == {"a"}
        assert granted(root, "us", i, 20) == {"b"}


def test_a_block_says_where_its_data_set_begins(root: Server) -> None:
    grant = ask(root, "us", 1, 20)
    assert grant is not None
    assert grant.blocks == (Block("b", 600, 600, 620, 0),)


def test_a_region_gets_nothing_when_its_data_set_is_used_up(root: Server) -> None:
    granted(root, "eu", 1, 600)
    assert ask(root, "eu", 2, 20) is None
    assert granted(root, "us", 1, 20) == {"b"}


def test_a_region_is_told_to_drain_when_its_data_set_is_used_up(root: Server) -> None:
    granted(root, "eu", 1, 600)
    effects = receive(root, "eu", request_of(2, 20))
    assert sent(effects, Drain) == {"eu": Drain(1, 1)}
    back = join_region(root, "eu", fence=9, datasets=("a",), tenure=1, granted=1)
    assert sent(back, Drain) == {"eu": Drain(9, 1)}


def test_who_has_both_makes_up_for_who_has_one(root: Server) -> None:
    granted(root, "eu", 1, 300)
    assert [granted(root, "ap", i, 50) for i in range(1, 5)] == [{"b"}] * 4
    assert {frozenset(granted(root, "ap", i, 20)) for i in range(5, 15)} == {
        frozenset("a"),
        frozenset("b"),
    }


def test_shares_stay_even_when_everybody_has_everything() -> None:
    root = root_server({"a": 600, "b": 400})
    join_region(root, "ap", datasets=("a", "b"))
    counts = {"a": 0, "b": 0}
    for i in range(1, 51):
        (dataset,) = granted(root, "ap", i, 10)
        counts[dataset] += 10
        assert abs(counts["a"] / 600 - counts["b"] / 400) < 0.05
    assert counts == {"a": 300, "b": 200}


def test_progress_counts_all_data_sets_together(root: Server) -> None:
    granted(root, "eu", 1, 100)
    grant = ask(root, "us", 1, 20)
    assert grant is not None
    assert grant.blocks[0].progress == 100


def test_what_a_region_gives_back_goes_only_to_who_has_it(root: Server) -> None:
    granted(root, "eu", 1, 600)
    granted(root, "us", 1, 400)
    assert ask(root, "ap", 1, 10) is None
    join_region(root, "sa", fence=9, datasets=("b",))
    assert ask(root, "sa", 1, 10) is None
    effects = tell(root, MemberLost("eu"))
    assert only(effects, Grant).blocks == (Block("a", 0, 0, 10, 1000),)
    assert found(effects, Grant, "ap")


def test_a_lease_is_of_one_data_set(root: Server) -> None:
    region = region_server()
    meet_parent(region)
    effects = join_worker(region, datasets=("a", "b"))
    request = region.state.leasing.request
    assert request is not None
    blocks = (
        Block("a", 0, 0, 2, 0),
        Block("b", 600, 600, 640, 2),
        Block("a", 0, 40, 42, 50),
    )
    effects = receive(region, "root", Grant(1, request.number, blocks))
    first = only(effects, Assignment)
    assert (first.lease.dataset, first.lease.ranges) == ("a", ((0, 2), (40, 42)))
    second = only(receive(region, "w0", finished(first)), Assignment)
    assert (second.lease.dataset, second.lease.origin) == ("b", 600)
    assert second.lease.ranges == ((600, 604),)


def test_a_worker_gets_only_samples_that_it_has() -> None:
    root = root_server({"a": 600, "b": 400})
    leases = [
        only(join_worker(root, f"w{d}{i}", fence=i + 1, datasets=(d,)), Assignment).lease
        for i, d in enumerate("abba")
    ]
    assert [lease.dataset for lease in leases] == ["a", "b", "b", "a"]
    assert [lease.ranges for lease in leases] == [
        ((0, 4),),
        ((600, 604),),
        ((604, 608),),
        ((4, 8),),
    ]
