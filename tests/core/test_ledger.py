"""Where each sample is: entrusted, issued, given back, retired, credited, delivered (DESIGN 5)."""

from __future__ import annotations

import pytest

from halos.core.ledger import Ledger, Pending, sections_for
from halos.core.samples import Block, Report


def root_ledger(**samples: int | None) -> Ledger:
    return Ledger(sections=sections_for(dict(samples)))


def spans(blocks: list[Block]) -> list[tuple[int, int]]:
    return [(block.start, block.end) for block in blocks]


class TestSections:
    def test_lie_end_to_end(self) -> None:
        sections = sections_for({"a": 30, "b": 20, "c": 10})
        assert [(s.dataset, s.origin, s.end) for s in sections] == [
            ("a", 0, 30),
            ("b", 30, 50),
            ("c", 50, 60),
        ]

    def test_a_run_without_end_is_of_one_data_set(self) -> None:
        assert root_ledger(a=None).available() == float("inf")
        assert root_ledger(a=None).total is None
        with pytest.raises(ValueError, match="one data set only"):
            sections_for({"a": None, "b": 10})

    def test_total_and_progress(self) -> None:
        ledger = root_ledger(a=30, b=20)
        ledger.take(12, "w", ("a",))
        ledger.take(5, "w", ("b",))
        assert (ledger.total, ledger.progress, ledger.available()) == (50, 17, 33)


class TestTaking:
    def test_follows_one_counter(self) -> None:
        ledger = root_ledger(a=None)
        taken = [ledger.take(n, w) for n, w in ((8, "w0"), (3, "w1"), (8, "w0"))]
        assert [spans(blocks) for blocks in taken] == [[(0, 8)], [(8, 11)], [(11, 19)]]
        assert [blocks[0].progress for blocks in taken] == [0, 8, 11]

    def test_gives_the_rest_and_then_nothing(self) -> None:
        ledger = root_ledger(a=10)
        assert spans(ledger.take(7, "w")) == [(0, 7)]
        assert spans(ledger.take(7, "w")) == [(7, 10)]
        assert ledger.take(7, "w") == []

    def test_returned_samples_come_first_and_at_todays_progress(self) -> None:
        """A range whose holder died uncredited is issued again (at today's learning rate)."""
        ledger = root_ledger(a=100)
        ledger.take(10, "dead")
        ledger.take(10, "w")
        ledger.give_back("dead")
        again = ledger.take(15, "w")
        assert [(b.start, b.end, b.progress) for b in again] == [(0, 10, 20), (20, 25, 20)]

    def test_returned_samples_come_before_those_of_a_block(self) -> None:
        ledger = Ledger()
        ledger.receive([Block("a", 0, 0, 30, 0)])
        ledger.take(10, "dead")
        ledger.give_back("dead")
        assert spans(ledger.take(15, "w")) == [(0, 10), (10, 15)]

    def test_returned_samples_come_back_in_order(self) -> None:
        ledger = root_ledger(a=100)
        for child in ("x", "y", "x"):
            ledger.take(10, child)
        ledger.give_back("x")
        ledger.give_back("y")
        assert spans(ledger.take(100, "w"))[:3] == [(0, 10), (10, 20), (20, 30)]

    def test_cuts_a_granted_block_and_counts_its_progress_on(self) -> None:
        ledger = Ledger()
        ledger.receive([Block("a", 0, 100, 130, progress=500)])
        taken = [ledger.take(8, "w")[0] for _ in range(3)]
        assert spans(taken) == [(100, 108), (108, 116), (116, 124)]
        assert [block.progress for block in taken] == [500, 508, 516]

    def test_spans_several_blocks_of_one_data_set(self) -> None:
        ledger = Ledger()
        ledger.receive(
            [Block("a", 0, 0, 4, 0), Block("b", 90, 90, 99, 4), Block("a", 0, 50, 60, 40)]
        )
        taken = ledger.take(10, "w", ("a", "b"))
        assert [(b.dataset, b.start, b.end) for b in taken] == [("a", 0, 4), ("a", 50, 56)]
        assert ledger.available(("b",)) == 9

    def test_fills_up_from_the_same_data_set_only(self) -> None:
        ledger = root_ledger(a=100, b=100)
        ledger.take(10, "dead", ("a",))
        ledger.give_back("dead")
        taken = ledger.take(15, "w")  # though b is further behind
        assert [(b.dataset, b.start, b.end) for b in taken] == [("a", 0, 10), ("a", 10, 15)]

    def test_only_of_the_data_sets_that_the_child_has(self) -> None:
        ledger = root_ledger(a=10, b=10)
        assert [b.dataset for b in ledger.take(10, "w", ("b",))] == ["b"]
        assert ledger.take(10, "w", ("b",)) == []
        assert ledger.take(10, "w", ("c",)) == []
        assert ledger.available(("a",)) == 10


class TestBalance:
    def test_the_data_set_furthest_behind_goes_next(self) -> None:
        ledger = root_ledger(a=300, b=100)
        counts = {"a": 0, "b": 0}
        for _ in range(20):
            (block,) = ledger.take(10, "w")
            counts[block.dataset] += 10
            assert abs(counts["a"] / 300 - counts["b"] / 100) <= 0.1
        assert counts == {"a": 150, "b": 50}

    def test_who_has_only_one_is_made_up_for_by_others(self) -> None:
        ledger = root_ledger(a=100, b=100)
        ledger.take(50, "w0", ("a",))
        assert {ledger.take(10, "w1")[0].dataset for _ in range(5)} == {"b"}


class TestRetiring:
    def test_what_is_retired_is_never_given_back(self) -> None:
        ledger = root_ledger(a=100)
        ledger.take(30, "w")
        ledger.retire("w", Report(contained=((0, 10),), dropped=((20, 25),)))
        ledger.give_back("w")
        assert spans(ledger.returned) == [(10, 20), (25, 30)]
        assert ledger.held == {}

    def test_only_what_is_held_can_be_retired(self) -> None:
        ledger = root_ledger(a=100)
        ledger.take(30, "w")
        ledger.take(30, "v")
        with pytest.raises(ValueError, match="25 to 35"):
            ledger.retire("w", Report(contained=((25, 35),)))

    @pytest.mark.parametrize(
        ("ranges", "answer"),
        [
            ([], True),
            ([(0, 10), (20, 30)], True),
            ([(0, 30)], False),  # 10 to 20 is another's
            ([(20, 31)], False),
            ([(0, 6), (5, 10)], False),  # twice
            ([(0, 5), (0, 5)], False),
            ([(40, 50)], False),  # nobody's yet
            ([(-5, 0)], False),
        ],
    )
    def test_holds(self, ranges: list[tuple[int, int]], answer: bool) -> None:
        ledger = root_ledger(a=100)
        for child in ("w", "v", "w"):
            ledger.take(10, child)
        assert ledger.holds("w", ranges) is answer
        assert not ledger.holds("nobody", [(0, 1)])

    def test_credit_counts_all_and_delivery_what_was_contained(self) -> None:
        ledger = root_ledger(a=100)
        ledger.credit(Report(contained=((0, 10), (20, 30)), dropped=((10, 20),)))
        assert ledger.credited.as_tuple() == ((0, 30),)
        assert ledger.delivered.as_tuple() == ((0, 10), (20, 30))

    def test_nothing_is_credited_twice(self) -> None:
        ledger = root_ledger(a=100)
        ledger.credit(Report(contained=((0, 10),)))
        with pytest.raises(ValueError, match="partly here already"):
            ledger.credit(Report(dropped=((9, 12),)))


class TestPending:
    def test_adds_up(self) -> None:
        pending = Pending()
        assert not pending
        pending.add(Report(2, 8, 100, 250.0, ((0, 10),), ((10, 20),)))
        pending.add(Report(1, 4, 50, 100.0, ((20, 30),)))
        assert pending
        expected = Report(3, 12, 150, 350.0, ((0, 10), (20, 30)), ((10, 20),))
        assert pending.to_report() == expected

    def test_dropping_keeps_the_counts(self) -> None:
        pending = Pending()
        pending.add(Report(2, 8, 100, 250.0, ((0, 10),), ((10, 20),)))
        pending.drop()
        assert pending.to_report() == Report(2, 8, 100, 250.0, (), ((0, 20),))

    def test_is_worth_a_push_even_when_all_of_it_was_dropped(self) -> None:
        pending = Pending()
        pending.add(Report(dropped=((0, 1),)))
        assert pending


def test_a_range_over_two_data_sets_comes_back_as_a_block_of_each() -> None:
    ledger = Ledger(sections=sections_for({"a": 100, "b": 50}))
    ledger.take(100, "eu", ("a",))
    ledger.take(10, "eu", ("b",))
    ledger.give_back("eu")
    assert [(b.dataset, b.origin, b.start, b.end) for b in ledger.returned] == [
        ("a", 0, 0, 100),
        ("b", 100, 100, 110),
    ]
