"""EAGLE heads compute what their papers say, in every layout, and change no byte of any text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.head_targets import compare, drafter_for, reference_for, target_for
from support.tiny_heads import TinyHead
from support.tiny_tokenizer import VOCAB_SIZE

EAGLE3 = TinyHead(vocab=VOCAB_SIZE)
EAGLE = TinyHead(kind="eagle", vocab=VOCAB_SIZE, taps=(8,), draft_vocab=0)

HEADS = {
    "SafeAILab": replace(EAGLE3, own_embedding=True),
    "SpecForge": replace(EAGLE3, layout="SpecForge", taps=(1, 3, 7)),
    "SpecForge without a norm before the head": replace(
        EAGLE3, layout="SpecForge", norm_output=False, taps=(1, 3, 7)
    ),
    "vLLM": replace(EAGLE3, layout="vLLM", taps=(2, 3, 8)),
    "speculators": replace(EAGLE3, layout="speculators", taps=(2, 4, 6)),
    "speculators, normed between steps": replace(EAGLE3, layout="speculators", norm_output=True),
    "a norm before everything": replace(EAGLE3, layout="speculators", norm_before_fc=True),
    "a norm of each state": replace(EAGLE3, layout="SpecForge", fc_norm=True),
    "a normed residual": replace(EAGLE3, layout="speculators", norm_before_residual=True),
    "five taps, qwen3": replace(
        EAGLE3,
        layout="DeepSpec",
        qk_norm=True,
        head_dim=32,
        taps=(1, 2, 4, 6, 7),
        draft_vocab=0,
        own_embedding=True,
    ),
    "all ids": replace(EAGLE3, draft_vocab=0),
    "two layers": replace(EAGLE3, layout="vLLM", layers=2),
    "another rope": replace(EAGLE3, settings={"rope_theta": 500.0}),
    "EAGLE-1": replace(EAGLE, bias=True, own_embedding=True),
    "EAGLE-1 without bias": replace(EAGLE, settings={"bias": False}),
    "EAGLE-1 of two layers": replace(EAGLE, layers=2),
}


@pytest.mark.parametrize("name", HEADS)
def test_logits_and_guesses_are_those_of_the_formulas(name: str, tmp_path: Path) -> None:
    tiny = HEADS[name]
    target = target_for(tmp_path)
    drafter = drafter_for(target, tiny.write(tmp_path / "head"))
    compare(drafter, target, reference_for(target, tiny))
