"""A target and a draft model, compared by headers and by a short run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core import SpeculationStats
from paceline.engine import LLM
from paceline.tools.pair import PairReport, _acceptance, inspect_pair, measure_gain
from paceline.weights.source import open_model
from support.tiny_pair import write_model


def inspect(target: Path, draft: Path, available: int = 1 << 30) -> PairReport:
    with open_model(target) as one, open_model(draft) as other:
        return inspect_pair(one, other, available=available)


@pytest.fixture(scope="module")
def pair_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_model(folder / "target.gguf", seed=1, layers=3, context=512)
    return target, write_model(folder / "draft.gguf", seed=1, layers=3, context=128)


def test_headers_tell_what_to_expect(pair_files: tuple[Path, Path]) -> None:
    report = inspect(*pair_files)
    assert (report.target, report.draft) == ("target.gguf", "draft.gguf")
    assert report.comparison.mode == "same"
    assert report.contexts == (512, 128)
    assert report.obstacles == ()
    assert report.notes == ("beyond 128 tokens of text the draft model is silent",)


def test_too_little_memory_is_an_obstacle(pair_files: tuple[Path, Path]) -> None:
    (obstacle,) = inspect(*pair_files, available=1 << 20).obstacles
    assert "MiB more memory than is free" in obstacle


def test_a_short_run_tells_acceptance_and_costs(pair_files: tuple[Path, Path]) -> None:
    target, draft = pair_files
    with LLM(target, speculate="off", max_model_len=100, threads=1) as llm:
        gain = measure_gain(llm, str(draft), ["the end", "1 2 3"], max_tokens=24)
    assert gain.identical
    assert 0.9 < gain.acceptance <= 1.0  # a draft that is cut by the end of the text counts as refused
    assert gain.break_even == gain.draft_cost + gain.row_cost
    assert gain.pays == (gain.forecast > 1.0)
    assert gain.measured > 0
    assert 1.0 <= gain.mean_acceptance_length <= 16


def test_acceptance_counts_only_what_was_decided_on() -> None:
    """Three passes of four: all kept, one kept, none kept; 5 of 7 decisions were for the draft."""
    stats = SpeculationStats(drafts=3, drafted=12, accepted=5, accepted_per_position=[2, 1, 1, 1])
    assert _acceptance([stats]) == 5 / 7
    assert _acceptance([SpeculationStats()]) == 0.0
