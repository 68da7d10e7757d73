"""The real demo model: recorded texts, and the promise of equal bits at real sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.models.target import NativeTarget
from paceline.native import instruction_sets
from paceline.weights.gguf import GGUFFile
from support.passes import Pass, greedy, random_tokens, run_in_chunks, table_of

RECORDED = json.loads((Path(__file__).parent / "recorded" / "smollm2_greedy.json").read_text())


@pytest.fixture(scope="module")
def target(smollm2_path: Path) -> NativeTarget:
    return NativeTarget.load(GGUFFile.open(smollm2_path), threads=2, max_model_len=1024)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_texts(target: NativeTarget, name: str) -> None:
    """Ids on which transformers in float32 agrees; see tests/oracles/record_models.py."""
    entry = RECORDED[name]
    assert greedy(target, entry["prompt"], len(entry["output"])) == entry["output"]


@pytest.mark.parametrize("isa", [isa for isa in instruction_sets() if isa != "portable"])
@pytest.mark.parametrize("threads", [1, 3])
def test_equal_bits_at_real_sizes(target: NativeTarget, smollm2_path: Path, isa: str, threads: int) -> None:
    tokens = random_tokens(300, target.vocab_size)
    run_in_chunks(target, tokens[:270], [270], table_of(target))
    one = Pass(target, [table_of(target)])
    one.chain(tokens[270:], 270)
    expected = one.logits()
    other = NativeTarget.load(GGUFFile.open(smollm2_path), threads=threads, isa=isa, max_model_len=1024)
    got = run_in_chunks(other, tokens, [100, 170, 1, 2, 8, 16, 3], table_of(other))[270:]
    assert (got == expected).all()


def test_the_portable_kernels_too(target: NativeTarget, smollm2_path: Path) -> None:
    """Slow without vector instructions, so a few rows must do."""
    tokens = random_tokens(6, target.vocab_size, seed=1)
    portable = NativeTarget.load(GGUFFile.open(smollm2_path), threads=2, isa="portable", max_model_len=64)
    expected = run_in_chunks(target, tokens, [1], table_of(target))
    got = run_in_chunks(portable, tokens, [6], table_of(portable))
    assert (got == expected).all()
    assert np.isfinite(got).all()
