"""A first token beside a long prompt, and a server against the engine: what is sent, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from harness.latency import FirstToken, Overhead, first_token, overhead
from harness.tasks import Task

from paceline import SamplingParams
from paceline.tools.peer_client import Server
from paceline.tools.prompts import Prompt
from support.scripted_server import answer, scripted_server
from support.stub_llm import stub_llm


@dataclass
class Running:
    client: Server
    name: str = "paceline off"


def test_no_prompt_begins_like_another() -> None:
    with scripted_server(*answer("a", tokens=4)) as script:
        found = first_token(Running(Server(script.url)), range(5000), short=20, long=300, times=4)  # type: ignore[arg-type]
    asked = [body["prompt"] for _, body in script.asked]
    assert [len(ids) for ids in sorted(asked, key=len)] == [20] * 9 + [300] * 5
    assert len({tuple(ids[:4]) for ids in asked}) == len(asked)
    assert (len(found.idle_s), len(found.beside_s), len(found.long_s), found.cached) == (4, 4, 4, 0)


def test_the_ratio_is_that_of_the_medians() -> None:
    found = FirstToken("x", 1.0, idle_s=[0.1, 0.2, 9.0], beside_s=[0.5, 0.1, 0.4])
    assert found.ratio == pytest.approx(2.0)


def test_the_same_text_is_equal_and_another_is_named() -> None:
    llm = stub_llm()
    params = SamplingParams(temperature=0.0, max_tokens=6)
    tasks = [Task("own", Prompt(str(i), "all", "abcabc"), llm.tokenize("abcabc")) for i in range(4)]
    right = llm.generate("abcabc", params).text
    for text, differences in ((right, []), ("something else", ["0", "1", "2", "3"])):
        with scripted_server(*answer(text[:1], text[1:], tokens=6)) as script:
            found = overhead(Running(Server(script.url)), llm, tasks, 6)  # type: ignore[arg-type]
        assert found.differences == differences
        assert (found.speculate, found.tokens) == ("off", 18)  # the first answer only warmed up
        assert len(found.server_s) == len(found.engine_s) == len(found.request_s) == len(found.call_s) == 3


def test_shares_are_of_decode_time() -> None:
    found = Overhead("off", 10, [1.1, 2.2, 9.0], [1.0, 2.0, 3.0], [2.0, 3.0, 9.5], [1.5, 2.5, 3.5])
    assert found.decode == pytest.approx(12.3 / 6 - 1)
    assert found.typical == pytest.approx(0.1)
    assert found.whole == pytest.approx((14.5 - 7.5) / 6)
