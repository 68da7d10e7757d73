"""From a file's name to a draft model that works: real kernels, tiny files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core import SamplingParams
from paceline.engine import LLM
from paceline.errors import ModelFileError, UsageError
from paceline.text.pairing import Mode
from support.tiny_pair import write_model
from support.vocabularies import CONTROL, byte_level


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pair")
    merges = ["t h", "th e", "a n", "i n", "e r"]
    foreign = byte_level(merges, extra={"<end>": CONTROL}, eos_token_id=261)
    return {
        "target": write_model(folder / "target.gguf", seed=1, layers=3),
        "twin": write_model(folder / "twin.gguf", seed=1, layers=3),
        "small": write_model(folder / "small.gguf", seed=2, layers=1),
        "short": write_model(folder / "short.gguf", seed=2, layers=1, context=32),
        "foreign": write_model(folder / "foreign.gguf", foreign, seed=3, layers=1),
    }


PROMPTS = ("the other thing in the end", "1 2 3 1 2 3", "😀 é", "")


@pytest.mark.parametrize(
    ("draft", "mode"),
    [
        ("twin", "same"),
        ("small", "same"),
        ("foreign", "intersection"),
        ("small,vocabulary=text", "text"),
        ("foreign,vocabulary=text", "text"),
    ],
)
def test_the_text_is_the_same_with_a_draft_model(files: dict[str, Path], draft: str, mode: Mode) -> None:
    name, _, options = draft.partition(",")
    spec = f"model:{files[name]}" + (f",{options}" if options else "")
    with LLM(files["target"], speculate=spec, max_model_len=256, threads=1) as llm:
        assert [drafter.pairing.mode for drafter in llm.draft_models] == [mode]
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=7, max_tokens=40, ignore_eos=True)
            plain = llm.generate(list(PROMPTS), params, speculate="off")
            fixed = llm.generate(list(PROMPTS), params, speculate=f"{spec},num_speculative_tokens=4")
            free = llm.generate(list(PROMPTS), params)
            assert [c.tokens for c in plain] == [c.tokens for c in fixed] == [c.tokens for c in free]
            assert any(c.speculation.drafted > 0 for c in fixed)
            if name == "twin":
                assert all(c.speculation.acceptance_rate == 1.0 for c in fixed)
        assert len(llm.draft_models) == 1  # loaded once, whatever planner asks it


def test_together_with_other_drafters(files: dict[str, Path]) -> None:
    """User problem C24."""
    spec: list[Any] = ["ngram", {"method": "draft_model", "model": str(files["twin"])}]
    with LLM(files["target"], speculate="off", max_model_len=256, threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        plain = llm.generate("the end", params)
        done = llm.generate("the end", params, speculate=[*spec, "suffix:num_speculative_tokens=3"])
        assert done.tokens == plain.tokens
        assert "model" in done.speculation.by_drafter


def test_clearing_forgets_and_works_on(files: dict[str, Path]) -> None:
    spec = f"model:{files['twin']},num_speculative_tokens=3"
    with LLM(files["target"], speculate=spec, max_model_len=256, threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        first = llm.generate("the end", params)
        llm.clear()
        again = llm.generate("the end", params)
        assert first.tokens == again.tokens
        assert again.speculation.acceptance_rate == 1.0
        cache = llm.draft_models[0].cache.kv
        cache.check_integrity()
        assert cache.available == cache.pages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("foreign,vocabulary=same", r"token ids differ between target and draft model \(256: "),
        ("short", r"sees only 32 tokens"),
        ("small,max_model_len=99999", r"max_model_len is 99999"),
        ("small,quantize=q4", r"does not apply"),
        ("small,vocabulary=none", r"option vocabulary of model is 'none'"),
        ("small,threads=0", r"threads is 0"),
    ],
)
def test_a_pair_that_cannot_work_is_refused(files: dict[str, Path], options: str, message: str) -> None:
    name, _, rest = options.partition(",")
    with pytest.raises(UsageError, match=message):
        LLM(files["target"], speculate=f"model:{files[name]},{rest}".strip(","), max_model_len=256, threads=1)


def test_a_missing_or_damaged_draft_model_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf"):
        LLM(files["target"], speculate=f"model:{tmp_path / 'nowhere.gguf'}", max_model_len=256, threads=1)
    (tmp_path / "cut.gguf").write_bytes(files["small"].read_bytes()[:5000])
    with pytest.raises(ModelFileError):
        LLM(files["target"], speculate=f"model:{tmp_path / 'cut.gguf'}", max_model_len=256, threads=1)
