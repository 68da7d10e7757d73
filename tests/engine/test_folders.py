"""Whole folders through the Python API and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run
from paceline.core import SamplingParams
from paceline.engine import LLM
from paceline.errors import ModelFileError, RequestError, UsageError
from paceline.weights.source import open_model
from support.folders import TinyFolder

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAID = [{"role": "user", "content": "ab</s>ab"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = TinyFolder(family="qwen2", dtype="BF16").write(
        tmp_path_factory.mktemp("models") / "tiny", shards=2
    )
    (path / "chat_template.jinja").write_text("{% for m in messages %}<s>{{ m.content }}{% endfor %}")
    chosen = {"temperature": 0.5, "top_k": 7, "eos_token_id": [65, 257]}
    (path / "generation_config.json").write_text(json.dumps(chosen))
    return path


def test_a_folder_answers_the_same_with_and_without_speculation(folder: Path) -> None:
    with LLM(folder, speculate="off", max_model_len=128) as plain, LLM(folder, max_model_len=128) as drafted:
        for prompt in ("abcabcabc", SAID, [1, 2, 3, 1, 2, 3]):
            one = plain.generate(prompt, GREEDY)
            assert len(one.tokens) == 24
            assert drafted.generate(prompt, GREEDY).tokens == one.tokens


def test_messages_go_through_the_folders_template(folder: Path) -> None:
    with LLM(folder, speculate="off", max_model_len=64) as llm:
        assert llm.chat_template is not None
        assert llm.chat_template.encode(llm.tokenizer, SAID) == [256, *b"ab</s>ab"]
        assert llm.tokenizer.eog_ids == {65, 257}


def test_the_folders_sampling_is_the_default(folder: Path) -> None:
    with LLM(folder, speculate="off", max_model_len=64) as llm:
        assert (llm.default_params.temperature, llm.default_params.top_k) == (0.5, 7)
        drawn = SamplingParams(temperature=0.5, top_k=7, seed=3)
        llm.default_params = replace(llm.default_params, seed=3)
        assert llm.generate("ab").tokens == llm.generate("ab", drawn).tokens


def test_quantising_while_loading(folder: Path) -> None:
    texts: dict[str | None, Any] = {}
    for method in (None, "q8", "q4"):
        with LLM(folder, quantize=method, speculate="off", max_model_len=64) as llm:
            texts[method] = llm.generate("ab", GREEDY).tokens
        with (
            open_model(folder, method) as source,
            LLM(source, speculate="off", max_model_len=64) as llm,
        ):
            assert llm.generate("ab", GREEDY).tokens == texts[method]
    assert len(set(map(tuple, texts.values()))) > 1
    with pytest.raises(UsageError, match="quantize is 'int4'"):
        LLM(folder, quantize="int4")
    with (
        open_model(folder) as source,
        pytest.raises(UsageError, match="quantize was given with an open model"),
    ):
        LLM(source, quantize="q8")
    with pytest.raises(UsageError, match="LLM has no option 'quantise'\nhint: did you mean 'quantize'"):
        LLM(folder, quantise="q8")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (TinyFolder().write(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        LLM(tmp_path)


def test_a_template_that_loops(tmp_path: Path) -> None:
    TinyFolder().write(tmp_path)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(loop)
    with (
        LLM(tmp_path, speculate="off", max_model_len=64) as llm,
        pytest.raises((ModelFileError, RequestError)),
    ):
        llm.generate(SAID)


# The command line


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def test_show_and_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(capsys, "show", str(folder), "--json")
    assert (shown["architecture"], shown["tokenizer"]) == ("qwen2", "tokenizer.json")
    assert shown["name"] == "tiny"
    assert shown["tensor_bytes"] == {"BF16": 2 * shown["parameters"]}
    assert shown["bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    whole, small = (
        output(capsys, "plan", str(folder), "--json", *more)["total"] for more in ([], ["--quantize", "q4"])
    )
    assert small < whole


def test_generate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", str(folder), "ab", "--raw", "--max-tokens", "8", "--ignore-eos", "--json"]
    plain = output(capsys, *asked)
    rounded = output(capsys, *asked, "--quantize", "q8")
    with LLM(folder, quantize="q8", speculate="off") as llm:
        expected = llm.generate("ab", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert json.dumps(expected.tokens) in json.dumps(rounded)
    assert plain
