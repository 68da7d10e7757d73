"""Figures of load tests against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import SpeculationStats
from paceline.tools.load_figures import Reply, differing, figures, inter_token, written
from paceline.tools.statistics import Quantiles


def reply(due: float, *pieces: float, tokens: int, end: float, **more: object) -> Reply:
    base = Reply(prompt="p", category="all", due_s=due, pieces_s=pieces, completion_tokens=tokens, end_s=end)
    return replace(base, **more)  # type: ignore[arg-type]


def test_one_answer() -> None:
    one = reply(1.0, 1.5, 2.0, 3.0, tokens=5, end=3.25, prompt_tokens=7)
    assert (one.first_token_s, one.latency_s, one.gaps_s) == (0.5, 2.25, [0.5, 1.0])
    assert one.tokens_per_gap == 2.0  # four tokens after the first, two gaps
    found = figures([one])
    assert (found.requests, found.errors, found.seconds) == (1, {}, 2.25)
    assert (found.prompt_tokens, found.completion_tokens) == (7, 5)
    assert found.output_tokens_per_s == pytest.approx(5 / 2.25)
    assert found.requests_per_s == pytest.approx(1 / 2.25)
    assert found.in_flight == pytest.approx(1.0)
    assert found.first_token_s == Quantiles(0.5, 0.5, 0.5)
    assert found.inter_token_s == Quantiles(0.25, 0.5, 0.5)  # tokens waited 0.25, 0.25, 0.5, 0.5
    assert found.gap_s == Quantiles(0.75, 0.95, 0.995)
    assert found.latency_s == Quantiles(2.25, 2.25, 2.25)
    assert found.acceptance is None


def test_failures_take_time_but_have_no_tokens_and_no_latency() -> None:
    good = reply(0.0, 1.0, 2.0, tokens=2, end=2.0)
    failed = reply(1.0, tokens=0, end=4.0, error="HTTP 429")
    found = figures([good, failed, replace(failed, error="timed out"), failed])
    assert found.errors == {"HTTP 429": 2, "timed out": 1}
    assert (found.requests, found.seconds, found.completion_tokens) == (4, 4.0, 2)
    assert (found.output_tokens_per_s, found.requests_per_s) == (0.5, 0.25)
    assert found.in_flight == pytest.approx((2 + 3 * 3) / 4)
    assert found.latency_s == Quantiles(2.0, 2.0, 2.0)


def test_nothing_that_was_not_measured_has_a_number() -> None:
    found = figures([reply(0.0, tokens=0, end=1.0, error="not reached")])
    assert (found.first_token_s, found.inter_token_s, found.gap_s, found.latency_s) == (None,) * 4
    assert (found.output_tokens_per_s, found.requests_per_s) == (0.0, 0.0)
    assert figures([]).seconds == 0.0


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    assert reply(1.0, tokens=1, end=1.5).first_token_s == 0.5
    assert reply(1.0, 1.25, tokens=1, end=1.5).tokens_per_gap == 0.0


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=30),
    st.integers(1, 4),
)
def test_inter_token_quantiles_are_those_of_the_tokens_written_out(gaps: list[int], per_gap: int) -> None:
    ends = np.cumsum([0, *gaps]) * 0.5
    one = reply(0.0, *ends.tolist(), tokens=1 + per_gap * len(gaps), end=100.0)
    tokens = np.sort(np.repeat(np.array(gaps) * 0.5 / per_gap, per_gap))
    found = inter_token([one])
    assert found is not None
    for value, share in ((found.p50, 0.5), (found.p90, 0.9), (found.p99, 0.99)):
        assert value == pytest.approx(np.quantile(tokens, share, method="inverted_cdf"))


def test_answers_of_many_tokens_weigh_more() -> None:
    slow = reply(0.0, 1.0, 2.0, tokens=2, end=2.0)
    fast = reply(0.0, *(0.1 * i for i in range(1, 101)), tokens=100, end=11.0)
    found = inter_token([slow, fast])
    assert found is not None
    assert (found.p50, found.p99) == (pytest.approx(0.1), pytest.approx(0.1))


def test_drafts_are_added_up() -> None:
    stats = SpeculationStats(passes=2, drafted=6, accepted=4, committed=6)
    found = figures([reply(0.0, 1.0, tokens=7, end=1.0, speculation=stats)] * 2).acceptance
    assert found is not None
    assert (found.mean_acceptance_length, found.accepted, found.drafted) == (3.0, 8, 12)


def test_a_prompt_answered_in_two_ways_is_named() -> None:
    a = reply(0.0, tokens=1, end=1.0, text="a")
    assert differing([a, a, replace(a, text="", error="timed out"), replace(a, prompt="q", text="b")]) == []
    assert differing([a, replace(a, text="b")]) == ["p"]


def test_quantiles_are_written_as_three_numbers() -> None:
    assert written(Quantiles(0.0104, 0.02, 0.5), 1e3, 1) == "10.4 / 20.0 / 500.0"
    assert written(None, 1e3, 1) == ""
