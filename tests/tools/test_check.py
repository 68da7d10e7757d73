"""The losslessness check must pass where nothing is wrong, and see what is."""

from __future__ import annotations

import random
from dataclasses import fields

from paceline.core import Completion, Output, Rows, SamplingParams
from paceline.engine import LLM
from paceline.tools.check import random_params, row_faults, text_faults
from support.stub_llm import stub_llm
from support.stub_target import RandomRule, StubTarget
from support.tiny_tokenizer import VOCAB_SIZE


class Leaky(StubTarget):
    """Rounds differently when five rows or more share a pass, as other engines do."""

    def forward(self, rows: Rows) -> Output:
        output = super().forward(rows)
        if len(rows.tokens) >= 5 and output.logits is not None:
            output.logits[2] *= 1 + 2**-23
        return output


def test_equal_rows_are_found_equal_in_every_group() -> None:
    faults = list(row_faults(StubTarget(RandomRule(50)), length=40))
    # 2, 3, 4, 5, 8, 13, 16, 32 and all 40 rows together, then three sequences in three ways
    assert faults == [None] * 12


def test_one_rounding_is_seen() -> None:
    faults = list(row_faults(Leaky(RandomRule(50)), length=16))
    assert {f.rows for f in faults if f and f.sequences == 1} == {5, 8, 13, 16}
    assert {f.position for f in faults if f and f.rows == 8 and f.sequences == 1} == {2, 10}
    assert {f.rows for f in faults if f and f.sequences == 3} == {8, 26}
    assert all(0 < f.largest_difference < 1e-5 for f in faults if f)
    assert faults.count(None) == 4  # groups of 2, 3 and 4, and one row of each of three


class Mingling(StubTarget):
    """Adds a little of its first row to the others when sequences share a pass."""

    def forward(self, rows: Rows) -> Output:
        output = super().forward(rows)
        if len(rows.tables) > 1 and output.logits is not None:
            output.logits[1:] += 1e-3 * output.logits[0]
        return output


def test_sequences_that_touch_are_seen() -> None:
    faults = [f for f in row_faults(Mingling(RandomRule(50)), length=16) if f]
    assert {(f.rows, f.sequences) for f in faults} == {(3, 3), (8, 3), (26, 3)}


def test_speculation_on_the_stub_changes_nothing() -> None:
    assert list(text_faults(stub_llm(), cases=25, max_tokens=16)) == [None] * 25


def test_a_changed_token_is_seen() -> None:
    llm = stub_llm()
    honest = llm.generate

    def broken(prompt: str, params: SamplingParams, *, speculate: str) -> Completion:
        completion = honest(prompt, params, speculate=speculate)
        if speculate != "off" and len(completion.tokens) > 3:
            completion.tokens[3] += 1
        return completion

    llm.generate = broken  # type: ignore[method-assign, assignment]
    faults = [f for f in text_faults(llm, cases=10, max_tokens=16) if f]
    assert faults
    assert {f.index for f in faults} == {3}


def test_cases_are_reproducible_and_reach_every_processor() -> None:
    drawn = [random_params(random.Random(str(i)), 48) for i in range(300)]
    assert drawn == [random_params(random.Random(str(i)), 48) for i in range(300)]
    default = SamplingParams()
    reached = {
        f.name
        for f in fields(SamplingParams)
        for p in drawn
        if getattr(p, f.name) != getattr(default, f.name)
    }
    assert reached == {f.name for f in fields(SamplingParams)} - {
        "stop_token_ids",
        "logprobs",
        "n",
        "verification",
    }


def test_the_stub_is_a_real_llm() -> None:
    assert isinstance(stub_llm(), LLM)
    assert len(stub_llm().tokenize("ab")) == 3  # BOS and two bytes
    assert stub_llm().engine.target.vocab_size == VOCAB_SIZE
