"""Chat and completions over HTTP: the same text as the Python API, in the shapes that clients expect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline import SamplingParams
from support.live_server import Live, chat_llm, live_server

MESSAGES = [{"role": "user", "content": "abcabc"}]
BODY = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(chat_llm()) as running:
        yield running


def test_chat_is_what_the_python_api_writes(live: Live) -> None:
    expected = live.llm.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=24))
    answer = live.post("/v1/chat/completions", BODY).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == expected.finish_reason
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "stub"
    assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)
    assert answer["usage"]["total_tokens"] == expected.prompt_tokens + len(expected.tokens)
