"""Figures of the pass, overhead and memory scripts, from numbers made up beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import results
from harness.llama_cpp import speculation
from memory import against_file, with_head
from overhead import Steps
from passes import Round, summarize

from paceline.drafters.checkpoint import open_checkpoint
from support.tiny_models import TinyModel


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


@pytest.mark.parametrize("spec", ["ngram", "ngram:min=2", "mtp:/some/head", "eagle3:head,dtype=q4", "auto"])
def test_a_drafter_with_a_path_or_without_need_of_one_is_taken_as_it_is(spec: str, tmp_path: Path) -> None:
    assert with_head(tmp_path / "none.gguf", spec, tmp_path) == spec


@pytest.mark.parametrize(("spec", "options"), [("mtp", ""), ("dspark:dtype=q4", ",dtype=q4")])
def test_the_kind_of_a_head_alone_means_a_random_one(spec: str, options: str, tmp_path: Path) -> None:
    kind = spec.partition(":")[0]
    model = TinyModel(layers=6, width=64, heads=4, head_dim=32).write(tmp_path / "model.gguf")
    assert with_head(model, spec, tmp_path) == f"{kind}:{tmp_path / kind}{options}"
    found = open_checkpoint(tmp_path / kind)
    assert found.kind == kind
    assert found.shape("blk.0.attn_q.weight") == (128, 64)
