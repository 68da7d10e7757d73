"""Benchmarks over the stub target: arms, order, equality, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.core import SamplingParams
from paceline.engine import LLM
from paceline.errors import RequestError, UsageError
from paceline.tools.bench import EngineArm, run
from paceline.tools.prompts import Prompt
from paceline.tools.statistics import Difference, Failure, Sample
from support.stub_llm import stub_llm

PARAMS = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [Prompt("1", "code", "abcabcabc"), Prompt("2", "prose", "hello"), Prompt("3", "code", "xyxyxy")]


class Spy:
    """An engine arm that notes its calls, and may change a sample or refuse a prompt."""

    decode_clock = "engine"

    def __init__(self, llm: LLM, name: str, log: list[str], change: Callable[[Sample], Sample] | None = None):
        self.name = name
        self._arm = EngineArm(llm, "off")
        self._log = log
        self._change = change

    def measure(self, prompt: Prompt, params: SamplingParams, *, chat: bool) -> Sample:
        self._log.append(f"{self.name}{prompt.name}")
        sample = replace(self._arm.measure(prompt, params, chat=chat), arm=self.name)
        return self._change(sample) if self._change else sample

    def clear(self) -> None:
        self._log.append("clear")
        self._arm.clear()


def test_arms_write_the_same_and_report_what_they_did() -> None:
    llm = stub_llm()
    arms = [EngineArm(llm, "off"), EngineArm(llm, "ngram"), EngineArm(llm, "ngram+suffix")]
    report = run(arms, PROMPTS, PARAMS, chat=False)
    assert report.arms == ["off", "ngram", "ngram+suffix"]
    assert (report.differences, report.failures) == ([], [])
    assert list(report.categories) == ["code", "prose"]
    plain, drafted = report.overall.figures["off"], report.overall.figures["ngram"]
    assert (
        plain.completion_tokens
        == drafted.completion_tokens
        == sum(len(s.tokens or ()) for s in report.samples if s.arm == "off")
    )
    assert plain.acceptance is not None
    assert (plain.acceptance.drafted, plain.acceptance.mean_acceptance_length) == (0, 1.0)
    assert drafted.acceptance is not None
    assert drafted.acceptance.drafted > 0
    assert drafted.acceptance.drafted_by == {"ngram": drafted.acceptance.drafted}
    assert report.overall.figures["off"].prompts == 3
    assert report.categories["code"].figures["off"].prompts == 2


def test_every_answer_starts_cold() -> None:
    llm = stub_llm()
    arms = [EngineArm(llm, "off"), EngineArm(llm, "suffix")]
    once = run(arms, PROMPTS[:1], PARAMS, chat=False)
    again = run(arms, PROMPTS[:1], PARAMS, chat=False, repeat=2)
    assert [s.cached_tokens for s in again.samples] == [0, 0, 0, 0]
    # A drafter that remembered the answer would draft more of it the second time.
    drafted = [s.speculation.drafted for s in again.samples if s.arm == "suffix" and s.speculation]
    first = [s.speculation.drafted for s in once.samples if s.arm == "suffix" and s.speculation]
    assert drafted == first * 2


def test_arms_take_turns_and_so_does_the_order() -> None:
    llm, log = stub_llm(), list[str]()
    run([Spy(llm, "a", log), Spy(llm, "b", log)], PROMPTS, PARAMS, chat=False)
    assert log[:2] == ["a1", "b1"]  # the warm-up
    assert log[3::2] == ["a1", "b1", "b2", "a2", "a3", "b3"]
    assert log[2::2] == ["clear"] * 6


def test_a_difference_is_found_with_its_place() -> None:
    llm, log = stub_llm(), list[str]()

    def corrupt(sample: Sample) -> Sample:
        assert sample.tokens is not None
        return replace(sample, tokens=(*sample.tokens[:4], -1, *sample.tokens[5:]))

    arms = [Spy(llm, "good", log), Spy(llm, "broken", log, corrupt)]
    report = run(arms, PROMPTS[:1], PARAMS, chat=False)
    assert report.differences == [Difference("1", "good", "broken", "token", 4)]


def test_another_engine_that_differs_is_no_fault_of_ours() -> None:
    llm, log = stub_llm(), list[str]()
    arms = [Spy(llm, "ours", log), Spy(llm, "server", log, lambda s: replace(s, tokens=None, text="?"))]
    report = run(arms, PROMPTS[:1], PARAMS, chat=False)
    assert report.differences == []
    assert [(d.arm, d.unit, d.index) for d in report.peer_differences] == [("server", "character", 0)]


def test_a_failed_prompt_is_left_out_for_every_arm() -> None:
    llm, log = stub_llm(), list[str]()

    def refuse(sample: Sample) -> Sample:
        if sample.prompt == "2":
            raise RequestError("the prompt has 9 tokens; the limit is 8")
        return sample

    arms = [Spy(llm, "a", log), Spy(llm, "b", log, refuse)]
    report = run(arms, PROMPTS, PARAMS, chat=False)
    assert report.failures == [Failure("b", "2", "prose", "the prompt has 9 tokens; the limit is 8")]
    assert report.overall.figures["a"].prompts == report.overall.figures["b"].prompts == 2
    assert list(report.categories) == ["code"]
    assert len(report.samples) == 5


def test_arms_need_different_names() -> None:
    llm = stub_llm()
    with pytest.raises(UsageError, match="not all different"):
        run([EngineArm(llm, "off"), EngineArm(llm, "off")], PROMPTS, PARAMS, chat=False)


@pytest.mark.parametrize("name", ["ngarm", "ngram+sufix", "ngram:mni=2"])
def test_a_misspelt_arm_is_refused_at_once(name: str) -> None:
    with pytest.raises(UsageError, match=r"ngarm|sufix|mni"):
        EngineArm(stub_llm(), name)


def test_a_prompt_too_long_for_the_model_is_a_failure_not_a_crash() -> None:
    llm = stub_llm(context_limit=16)
    report = run([EngineArm(llm, "off")], [Prompt("long", "all", "x" * 50), PROMPTS[1]], PARAMS, chat=False)
    assert [f.prompt for f in report.failures] == ["long"]
    assert report.overall.figures["off"].prompts == 1
