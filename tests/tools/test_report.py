"""The HTML page: complete, self-contained, deterministic, and safe to open."""

from __future__ import annotations

import re

from paceline.core import SamplingParams
from paceline.tools.bench import EngineArm, Report, run
from paceline.tools.prompts import Prompt
from paceline.tools.report import page
from paceline.tools.statistics import Difference, Failure
from support.stub_llm import stub_llm


def report() -> Report:
    llm = stub_llm()
    prompts = [Prompt("1", "code", "abcabcabc"), Prompt("2", "<script>alert(1)</script>", "hello")]
    arms = [EngineArm(llm, "off"), EngineArm(llm, "ngram")]
    return run(arms, prompts, SamplingParams(temperature=0.0, max_tokens=24), chat=False)


def test_the_page_fetches_nothing_and_escapes_everything() -> None:
    text = page(report(), {"model": {"name": "<b>model</b>"}})
    assert "<script" not in text
    assert "<b>model" not in text
    assert "&lt;script&gt;" in text
    outside = {u for u in re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", text) if u[0] != "#"}
    assert outside == set()
    assert text.count("<svg") == 3
    assert "identical tokens" in text


def test_chances_are_drawn_only_where_somebody_gave_some() -> None:
    assert "chance that the drafter gave" in page(report(), {})
    arms = [EngineArm(stub_llm(), "off")]
    silent = run(
        arms, [Prompt("1", "code", "abc")], SamplingParams(temperature=0.0, max_tokens=4), chat=False
    )
    assert "chance that the drafter gave" not in page(silent, {})


def test_ids_of_the_plots_do_not_collide() -> None:
    text = page(report(), {})
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text))
    assert wanted <= set(ids)


def test_the_same_report_gives_the_same_page() -> None:
    found = report()
    assert page(found, {}) == page(found, {})


def test_differences_and_failures_stand_out() -> None:
    found = report()
    found.differences.append(Difference("1", "off", "ngram", "token", 3))
    found.failures.append(Failure("ngram", "9", "code", "too long"))
    text = page(found, {})
    assert "class=bad>1 outputs differ from off" in text
    assert "<li>9 on ngram: too long" in text
