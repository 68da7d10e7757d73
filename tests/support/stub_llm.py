"""An `LLM` over the stub target: everything real but the arithmetic."""

from __future__ import annotations

from paceline.engine import LLM
from paceline.planning.pass_time import PassTime
from support.stub_target import RepetitiveRule, StubTarget
from support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer


def stub_llm(context_limit: int = 512) -> LLM:
    target = StubTarget(RepetitiveRule(VOCAB_SIZE, peak=4.5), context_limit=context_limit)
    return LLM.from_target(target, tiny_tokenizer(), pass_time=PassTime({1: 1e-3, 64: 1.2e-3}))
