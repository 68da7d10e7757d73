"""The table of pass times: measured, interpolated, corrected, and not thrown off by noise."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import Ids, Output, Rows
from paceline.planning.pass_time import BETWEEN, OCTAVES, PassTime

TABLE = {1: 5.0, 2: 5.1, 4: 5.5, 8: 7.0, 16: 13.0}


def test_measured_points_and_the_lines_between():
    table = PassTime(TABLE)
    assert [table.cost(r) for r in (1, 2, 3, 4, 6, 8, 12, 16)] == pytest.approx(
        [5.0, 5.1, 5.3, 5.5, 6.25, 7.0, 10.0, 13.0]
    )
    assert table.costs(1, 4) == pytest.approx([5.0, 5.1, 5.3, 5.5])


def test_past_the_table_its_last_octave_goes_on():
    assert PassTime(TABLE).cost(20) == pytest.approx(16.0)
    assert PassTime({1: 1.0, 8: 2.0, 15: 9.0, 16: 4.0}).cost(18) == pytest.approx(9.0 + 2 * 7.0 / 8)


def test_a_table_of_one_entry_grants_no_free_rows():
    assert PassTime({1: 2.0}).cost(3) == pytest.approx(6.0)


def test_more_rows_never_cost_less():
    assert PassTime({1: 5.0, 2: 4.0, 4: 4.5, 8: 9.0}).costs(1, 4) == [5.0] * 4


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10.0), min_size=1),
    st.lists(st.tuples(st.integers(1, 80), st.floats(1e-5, 100.0)), max_size=60),
)
def test_stays_monotone_and_positive_whatever_is_observed(table, observations):
    times = PassTime(table)
    for rows, seconds in observations:
        times.observe(rows, seconds)
    costs = times.costs(1, 100)
    assert costs[0] > 0
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(costs))


def test_spikes_change_nothing_that_matters():
    rng = random.Random(0)
    times = PassTime(TABLE)
    for _ in range(400):
        rows = rng.choice([1, 4, 8])
        noise = rng.choice([0.98, 1.0, 1.02]) if rng.random() < 0.9 else 20.0
        times.observe(rows, TABLE[rows] * noise)
    assert [times.cost(r) / times.cost(1) for r in (4, 8)] == pytest.approx([1.1, 1.4], rel=0.05)
    assert times.cost(1) == pytest.approx(5.0, rel=0.1)


def test_follows_a_machine_that_became_slower():
    times = PassTime(TABLE)
    for _ in range(120):
        for rows in (1, 8):
            times.observe(rows, 2 * TABLE[rows])
    assert times.cost(1) == pytest.approx(10.0, rel=0.05)
    assert times.cost(16) == pytest.approx(26.0, rel=0.1)


def test_learns_that_many_rows_cost_more_than_was_measured():
    times = PassTime(TABLE)
    for _ in range(400):
        times.observe(1, 5.0)
        times.observe(8, 12.0)
    assert times.cost(8) / times.cost(1) == pytest.approx(2.4, rel=0.1)


def test_one_kind_of_pass_alone_does_not_bend_the_curve_much():
    times = PassTime(TABLE)
    for _ in range(200):
        times.observe(1, 10.0)
    assert times.cost(8) / times.cost(1) == pytest.approx(1.4, rel=0.2)


class TimedTarget:
    """Takes as long as its table says, on a clock of its own."""

    vocab_size, context_limit, max_rows, page_size, pages = 10, 4096, 32, 16, 4
    window = None

    def __init__(self, seconds_per_row: float = 0.0) -> None:
        self.now = 0.0
        self.calls: list[int] = []
        self.seconds_per_row = seconds_per_row

    def clock(self) -> float:
        return self.now

    def forward(self, rows: Rows) -> Output:
        n = len(rows.tokens)
        assert rows.slots.tolist() == rows.positions.tolist() == list(range(n))
        assert rows.tables.shape == (1, -(-n // self.page_size))
        assert set(rows.parents.tolist()) == {-1}
        self.calls.append(n)
        slow = 10.0 if len(self.calls) % 17 == 0 else 1.0  # now and then something else takes the machine
        self.now += slow * (0.001 + self.seconds_per_row * n)
        return Output(np.zeros(n, np.int32), None)

    def move(
        self, table: Ids, sources: list[int], targets: list[int], window_table: Ids | None = None
    ) -> None:
        raise AssertionError("measuring moves nothing")

    def copy_page(self, source: int, target: int) -> None:
        raise AssertionError("measuring copies nothing")


def test_measures_every_row_count_within_the_targets_limits():
    target = TimedTarget(0.0001)
    for most in (5, 16, 99):
        times = PassTime.measure(target, max_rows=most, clock=target.clock)
        counts = [r for r in sorted(OCTAVES + BETWEEN) if r <= min(most, target.max_rows)]
        assert times.table() == pytest.approx({r: 0.001 + 0.0001 * r for r in counts})


def test_a_slow_target_is_measured_at_few_row_counts_within_the_time():
    target = TimedTarget(0.05)
    times = PassTime.measure(target, clock=target.clock)
    assert times.table() == pytest.approx({r: 0.001 + 0.05 * r for r in (1, 2, 4, 8, 16)})
    assert len(target.calls) == 1 + 2 * 5


def test_scratch_rows_fit_into_few_pages():
    target = TimedTarget()
    target.pages, target.page_size = 1, 6
    assert max(PassTime.measure(target, clock=target.clock).table()) == 6


def test_past_the_table_its_last_octave_goes_on_and_is_corrected_by_what_is_seen():
    times = PassTime({1: 10.0, 8: 16.0, 16: 27.0})
    assert times.cost(64) == pytest.approx(27.0 + 48 * 11 / 8)
    assert times.cost(128) == pytest.approx(27.0 + 112 * 11 / 8)
    assert times.table() == {1: 10.0, 8: 16.0, 16: 27.0}
    for _ in range(600):
        times.observe(1, 10.0)
        times.observe(16, 27.0)
        times.observe(64, 120.0)
    assert times.cost(64) == pytest.approx(120.0, rel=0.05)
    assert times.cost(1) == pytest.approx(10.0, rel=0.05)


def test_the_largest_pass_within_a_time():
    times = PassTime({1: 10.0, 8: 16.0, 16: 27.0})
    assert times.rows_within(27.0 + 20 * 11 / 8 + 0.01, 99) == 36
    assert times.rows_within(27.0 + 20 * 11 / 8 + 0.01, 30) == 30
    assert times.rows_within(16.0, 99) == 8
    assert times.rows_within(9.0, 99) == 0


def test_rows_that_look_far_back_weigh_more_once_that_was_seen():
    times = PassTime({1: 10.0, 8: 16.0, 16: 27.0})
    assert times.weight(4000) == 1.0
    before = times.costs(1, 64)
    for _ in range(200):
        times.observe_prompts(32, 32 * 1000, times.cost(32) + 32 * 1000 * 0.001)
        times.observe_prompts(32, 32 * 10, 1000.0)  # short looks say nothing
    assert times.weight(1000) == pytest.approx(1.0 + 1000 * 0.001 / (11 / 8))
    assert times.weight(0) == 1.0
    assert times.costs(1, 64) == before, "prompts say nothing about the rest"
    times.observe_prompts(32, 32 * 1000, 1e9)
    assert times.weight(1000) < 1.5 * (1.0 + 1000 * 0.001 / (11 / 8)), "one slow pass proves little"
