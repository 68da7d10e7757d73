"""`generate` over the stub target: where prompts come from, what stdout holds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import generate
from paceline.cli.main import run
from paceline.cli.options import MachineFlags
from paceline.engine import LLM
from paceline.text.template import ChatTemplate
from support.stub_llm import stub_llm

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ '>' if add_generation_prompt }}"
)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """What `generate` loads, whatever it is asked for."""
    loaded = stub_llm()

    def load(model: str, machine: MachineFlags, speculate: Any) -> tuple[LLM, Path, float]:
        loaded.speculate = speculate
        return loaded, Path(model), 0.25

    monkeypatch.setattr(generate, "load", load)
    return loaded


def run_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert run(["generate", "stub", *arguments, "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_the_object_has_everything(llm: LLM, capsys: Capture) -> None:
    found = run_json(capsys, "abcabcabc", "-n", "24", "--speculate", "ngram")
    assert {"text", "tokens", "finish_reason", "usage", "timings", "speculation"} <= found.keys()
    assert found["usage"] == {"prompt_tokens": 10, "completion_tokens": 24, "cached_tokens": 0}
    assert {"load_s", "prefill_s", "decode_s"} <= found["timings"].keys()
    assert found["timings"]["load_s"] == 0.25
    expected = {
        "passes",
        "drafted",
        "accepted",
        "accepted_per_position",
        "mean_acceptance_length",
        "by_drafter",
    }
    assert expected | {"off_reason"} <= found["speculation"].keys()
    assert found["speculation"]["drafted"] == found["speculation"]["by_drafter"]["ngram"]["drafted"] > 0
    assert (len(found["tokens"]), len(found["token_sources"])) == (24, 24)
    assert llm.detokenize(found["tokens"]) == found["text"]


def test_speculation_changes_what_is_reported_and_not_what_is_written(llm: LLM, capsys: Capture) -> None:
    drafted = run_json(capsys, "abcabcabc", "-n", "24", "--speculate", "ngram")
    llm.clear()
    plain = run_json(capsys, "abcabcabc", "-n", "24", "--speculate", "off")
    assert (plain["text"], plain["tokens"]) == (drafted["text"], drafted["tokens"])
    assert plain["speculation"]["drafted"] == 0
    assert plain["speculation"]["off_reason"]


def test_plain_output_is_the_text_and_a_newline(llm: LLM, capsys: Capture) -> None:
    text = run_json(capsys, "hello", "-n", "12")["text"]
    assert run(["generate", "stub", "hello", "-n", "12"]) == 0
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert err.startswith("[6 + 12 tokens")
    assert err.endswith("length]\n")


def test_a_prompt_may_come_from_argument_file_or_stdin(
    llm: LLM, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("naïve 猫\n", encoding="utf-8")
    expected = run_json(capsys, "naïve 猫")["tokens"]
    assert run_json(capsys, "--file", str(path))["tokens"] == expected
    for dash in ((), ("-",)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("naïve 猫\n".encode())))
        assert run_json(capsys, *dash)["tokens"] == expected


def test_the_model_may_be_a_flag(llm: LLM, capsys: Capture) -> None:
    assert run(["generate", "--model", "stub", "hello", "-n", "3", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "stub"


def test_the_model_may_be_a_variable_and_an_argument_beats_it(
    llm: LLM, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_MODEL", "from-the-environment")
    for arguments, expected in ((["hello"], "from-the-environment"), (["typed", "hello"], "typed")):
        assert run(["generate", *arguments, "-n", "3", "--json", "-q"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["model"], found["usage"]["prompt_tokens"]) == (expected, len(llm.tokenize("hello")))


def test_the_template_is_used_when_there_is_one(llm: LLM, capsys: Capture) -> None:
    raw = run_json(capsys, "hi", "-n", "4")
    assert raw["usage"]["prompt_tokens"] == len(llm.tokenize("hi"))
    with_template = ChatTemplate(TEMPLATE)
    llm.chat_template = with_template
    try:
        chat = run_json(capsys, "hi", "-n", "4", "--system", "S")
        assert chat["usage"]["prompt_tokens"] == len("system:S;user:hi;>") == 18
        assert run_json(capsys, "hi", "-n", "4", "--chat")["usage"]["prompt_tokens"] == len("user:hi;>")
        assert run_json(capsys, "hi", "-n", "4", "--raw")["tokens"] == raw["tokens"]
    finally:
        with_template.close()


@pytest.mark.parametrize("flag", [["--chat"], ["--system", "S"]])
def test_chat_without_a_template_is_refused(llm: LLM, capsys: Capture, flag: list[str]) -> None:
    assert run(["generate", "stub", "hi", *flag]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "template" in err


def test_several_answers_are_lines_of_json_in_order(llm: LLM, capsys: Capture) -> None:
    assert (
        run(["generate", "stub", "hi", "--n", "3", "--temp", "1", "--seed", "5", "-n", "6", "--json", "-q"])
        == 0
    )
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["seed"] for a in answers] == [5, 6, 7]
    alone = run_json(capsys, "hi", "--temp", "1", "--seed", "6", "-n", "6")
    assert alone["tokens"] == answers[1]["tokens"]


def test_logprobs_are_one_per_token(llm: LLM, capsys: Capture) -> None:
    found = run_json(capsys, "hi", "-n", "5", "--logprobs", "2")
    assert [p["token"] for p in found["logprobs"]] == found["tokens"]
    assert all(len(p["top"]) == 2 and p["logprob"] <= 0 for p in found["logprobs"])


def test_a_prediction_file_is_drafted_from(llm: LLM, capsys: Capture, tmp_path: Path) -> None:
    text = run_json(capsys, "hi", "-n", "30", "--speculate", "off")["text"]
    path = tmp_path / "expected.txt"
    path.write_text(text, encoding="utf-8")
    llm.clear()
    found = run_json(capsys, "hi", "-n", "30", "--prediction", str(path))
    assert found["text"] == text
    assert (
        found["speculation"]["by_drafter"].keys()
        == {"prediction"} | found["speculation"]["by_drafter"].keys()
    )


def test_a_prompt_that_does_not_fit_is_a_failure_with_the_numbers(llm: LLM, capsys: Capture) -> None:
    assert run(["generate", "stub", "x" * 600]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the prompt has 601 tokens; the context limit is 512" in err
