"""What is recorded of a text is what its drafters would have heard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.core import SamplingParams
from paceline.engine.llm import LLM
from paceline.errors import RequestError, UsageError
from paceline.training import need_torch
from paceline.training.transcripts import write
from paceline.training.trial import Trial, trial
from support.fitted import FITTED, PROMPTS
from support.head_targets import states_of


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(FITTED / "target", threads=1, max_model_len=256, speculate="off")


def params(seed: int, tokens: int = 40) -> SamplingParams:
    return SamplingParams(temperature=0.8 * bool(seed), seed=seed, max_tokens=tokens, ignore_eos=True)


def test_texts_and_states_are_those_of_the_engine(llm: LLM) -> None:
    llm.clear()
    lines: list[str] = []
    prompts = [llm.tokenize(prompt) for prompt in PROMPTS[:3]]
    asked = [params(seed) for seed in range(3)]
    texts = write(llm, prompts, asked, [2, 8], lines.append)
    assert lines == [f"text {i} of 3: {40 * i} tokens written" for i in (1, 2, 3)] or len(lines) == 3
    for text, prompt, its in zip(texts, prompts, asked, strict=True):
        plain = llm.generate(prompt, its, speculate="off")
        assert text.tokens.tolist() == [*prompt, *plain.tokens]
        assert text.written == len(prompt)
        assert text.states.keys() == {2, 8}
        expected = states_of(llm.engine.target, text.tokens.tolist(), [2, 8])  # type: ignore[arg-type]
        for layer in (2, 8):
            np.testing.assert_array_equal(text.states[layer], expected[layer][:-1])
        llm.clear()  # the pass above wrote to pages that the engine holds for its own


def test_a_text_is_recorded_whole_whatever_the_cache_holds(llm: LLM) -> None:
    """Texts are read beside each other, and what one finds of another would depend on the clock."""
    llm.clear()
    prompt = llm.tokenize(PROMPTS[1] * 4)
    first, *others = write(llm, [prompt], [params(3)], [4]) + write(llm, [prompt] * 3, [params(3)] * 3, [4])
    assert len(others) == 3
    for text in others:
        assert text.written == first.written == len(prompt)
        np.testing.assert_array_equal(text.tokens, first.tokens)
        np.testing.assert_array_equal(text.states[4], first.states[4])


def test_a_text_that_was_sent_back_is_recorded_once() -> None:
    """A cache for less than two of these texts: the younger gives way and is computed again."""
    llm = LLM(FITTED / "target", threads=1, max_model_len=256, speculate="off")
    prompts = [llm.tokenize(prompt) for prompt in PROMPTS[:2]]
    alone = [write(llm, [prompt], [params(1, 200)], [2, 4])[0] for prompt in prompts]
    held = llm.engine.cache.open([])
    pages = llm.engine.target.page_size
    assert llm.engine.cache.reserve(held, llm.engine.target.pages * pages - 300)
    before = llm.engine.counters.preemptions
    for text, expected in zip(write(llm, prompts, [params(1, 200)] * 2, [2, 4]), alone, strict=True):
        np.testing.assert_array_equal(text.tokens, expected.tokens)
        for layer in (2, 4):
            np.testing.assert_array_equal(text.states[layer], expected.states[layer])
    assert llm.engine.counters.preemptions > before


def test_several_texts_of_a_prompt_are_texts_of_their_own(llm: LLM) -> None:
    llm.clear()
    its = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    texts = write(llm, [PROMPTS[0]], [its], [8])
    answers = llm.generate([PROMPTS[0]], its, speculate="off")
    assert [text.tokens[text.written :].tolist() for text in texts] == [c.tokens for c in answers]


def test_what_cannot_be_asked_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 999"):
        write(llm, [[1, 999]], [params(0)], [8])


def test_a_trial_counts_what_the_engine_counted(llm: LLM) -> None:
    found = trial(llm, "eagle", FITTED / "eagle", PROMPTS[:2], params(1), drafts=3)
    spec = {"method": "eagle", "model": str(FITTED / "eagle"), "num_speculative_tokens": 3}
    stats = [llm.generate(prompt, params(1), speculate=spec).speculation for prompt in PROMPTS[:2]]
    assert found.passes == sum(s.drafts for s in stats)
    assert sum(found.kept) == sum(s.accepted for s in stats) > 0
    assert found.length == pytest.approx(sum(s.accepted for s in stats) / found.passes)
    assert Trial(0, (0, 0)).shares == [0.0, 0.0]


def test_without_torch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r'needs torch\nhint: pip install "paceline\[train\]"'):
        need_torch()


def test_only_the_fitting_imports_torch() -> None:
    source = Path(__file__).parents[2] / "src" / "paceline"
    using = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if any(line.startswith(("import torch", "from torch")) for line in path.read_text().splitlines())
    }
    assert using
    assert all(name.startswith("training/") for name in using)
    assert not using & {"training/transcripts.py", "training/trial.py", "training/__init__.py"}
