"""Figures of the pass, overhead and memory scripts, from numbers made up beforehand."""

from __future__ import annotations

import pytest
from harness import results
from harness.llama_cpp import speculation
from memory import against_file
from overhead import Steps
from passes import Round, summarize


def a_round(ours: dict[int, float], theirs: dict[int, float]) -> Round:
    ours_best = {rows: seconds / 2 for rows, seconds in ours.items()}
    return Round(ours, ours_best, theirs, dict(theirs), bandwidth=1e9, share=0.5)


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is ten times slower in one round changes times, not ratios."""
    rounds = [
        a_round({1: 1.0, 8: 1.5}, {1: 2.0, 8: 6.0}),
        a_round({1: 10.0, 8: 15.0}, {1: 20.0, 8: 60.0}),
        a_round({1: 1.0, 8: 1.5}, {1: 2.0, 8: 6.0}),
    ]
    found = summarize(8, rounds)
    assert (found.ours, found.theirs) == (1.5, 6.0)
    assert (found.over_one, found.theirs_over_one) == (1.5, 3.0)
    assert (found.ours_best, found.theirs_best) == (0.75, 6.0)
    assert (found.ratio, found.ratio_best) == (0.25, 0.125)


def test_without_a_peer_there_is_nothing_to_compare() -> None:
    found = summarize(8, [a_round({1: 1.0, 8: 1.5}, {})])
    assert found.over_one == 1.5
    assert (
        found.theirs is found.theirs_best is found.theirs_over_one is found.ratio is found.ratio_best is None
    )


def test_the_share_of_a_step_is_its_mean_over_a_one_row_pass() -> None:
    found = Steps([100.0, 200.0, 300.0, 400.0, 1000.0]).summary(one_row_us=10_000.0)
    assert found == {"steps": 5, "mean_us": 400.0, "median_us": 300.0, "p95_us": 400.0, "share": 0.04}


def test_memory_is_held_against_file_and_cache() -> None:
    measured = {"VmRSS": 1300, "kv_bytes": 200, "RssAnon": 1000, "RssFile": 300, "VmHWM": 1400}
    found = against_file({"name": "m.gguf", "bytes": 1000}, measured)
    assert found["limit"] == 1350
    assert found["over"] == pytest.approx(0.1)


def test_a_llama_pass_commits_one_token_beside_the_accepted_ones() -> None:
    found = speculation({"predicted_n": 101, "draft_n": 80, "draft_n_accepted": 60})
    assert (found.passes, found.drafted, found.accepted, found.committed) == (40, 80, 60, 100)
    plain = speculation({"predicted_n": 101})
    assert (plain.passes, plain.drafted, plain.mean_acceptance_length) == (100, 0, 1.0)


def test_tables_show_three_digits_and_dashes() -> None:
    shown = results.table(["a", "b"], [["x", 1.2345], ["y", None], [3, 45.67], ["z", 1234.5]])
    assert shown.splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| x | 1.23 |",
        "| y | – |",
        "| 3 | 45.7 |",
        "| z | 1234 |",
    ]
