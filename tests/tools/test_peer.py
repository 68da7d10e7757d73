"""Measuring a server that speaks server-sent events, against a small real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.core import SamplingParams
from paceline.errors import RequestError, ResourceError, UsageError
from paceline.tools.peer import ServerArm
from paceline.tools.prompts import Prompt

PROMPT = Prompt("7", "code", "def f():")
PARAMS = SamplingParams(temperature=0.0, max_tokens=32, stop=["END"])
TIMINGS = {"prompt_n": 12, "prompt_ms": 48.0, "predicted_n": 9, "predicted_ms": 250.0}


@dataclass
class Script:
    """What the server answers, and what it was asked."""

    events: list[str] = field(default_factory=list)
    status: int = 200
    owned_by: str = "someone"
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m", "owned_by": script.owned_by}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            script.asked.append((self.path, json.loads(self.rfile.read(length))))
            script.headers.append(dict(self.headers))
            self.send_response(script.status)
            self.end_headers()
            for event in script.events:
                self.wfile.write(event.encode())
                self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(**value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def chat_events(*pieces: str, **last: Any) -> list[str]:
    deltas = [event(choices=[{"delta": {"role": "assistant", "content": ""}}])]
    deltas += [event(choices=[{"delta": {"content": piece}}]) for piece in pieces]
    usage = {"prompt_tokens": 12, "completion_tokens": 9}
    ending = [event(choices=[{"delta": {}, "finish_reason": "stop"}])]
    return [
        ": comment\n\n",
        *deltas,
        *ending,
        event(**({"choices": [], "usage": usage} | last)),
        "data: [DONE]\n\n",
    ]


def test_tokens_come_from_usage_not_from_chunks() -> None:
    script = Script(chat_events("Hello ", "wörld, this is a lot of text in two chunks"))
    with serving(script) as url:
        arm = ServerArm(f"{url}/v1/", "peer")
        sample = arm.measure(PROMPT, PARAMS, chat=True)
    assert (sample.prompt_tokens, sample.completion_tokens, sample.decode_tokens) == (12, 9, 8)
    assert sample.text == "Hello wörld, this is a lot of text in two chunks"
    assert (sample.arm, sample.prompt, sample.category, sample.finish_reason) == ("peer", "7", "code", "stop")
    assert (sample.tokens, sample.prefill_s, sample.speculation) == (None, None, None)
    assert sample.first_token_s > 0
    assert arm.decode_clock == "first to last text received"


def test_the_request_says_what_our_own_arms_do() -> None:
    script = Script(chat_events("x"))
    with serving(script) as url:
        ServerArm(url).measure(PROMPT, PARAMS, chat=True)
    path, body = script.asked[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "def f():"}],
        "temperature": 0.0,
        "max_tokens": 32,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_raw_prompts_go_to_completions_and_the_key_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    script = Script(
        [event(choices=[{"text": "ab", "finish_reason": "length"}], usage=usage), "data: [DONE]\n\n"]
    )
    with serving(script) as url:
        sample = ServerArm(url).measure(PROMPT, PARAMS, chat=False)
    assert script.asked[0][0] == "/v1/completions"
    assert script.asked[0][1]["prompt"] == "def f():"
    assert script.headers[0]["Authorization"] == "Bearer k"
    assert (sample.text, sample.finish_reason, sample.completion_tokens) == ("ab", "length", 2)


def test_llama_server_tells_its_own_times_and_drafts() -> None:
    drafts = {"draft_n": 10, "draft_n_accepted": 5}
    script = Script(chat_events("x", "y", timings=TIMINGS | drafts), owned_by="llamacpp")
    with serving(script) as url:
        arm = ServerArm(url)
        sample = arm.measure(PROMPT, PARAMS, chat=True)
    assert (sample.prefill_s, sample.decode_s) == (pytest.approx(0.048), pytest.approx(0.25))
    assert arm.decode_clock == "the server's timings"
    assert script.asked[0][1]["cache_prompt"] is False
    assert sample.speculation is not None
    # Nine tokens: one from prefill; eight from three passes, five of them drafted.
    assert (sample.speculation.passes, sample.speculation.drafted, sample.speculation.accepted) == (3, 10, 5)
    assert sample.speculation.mean_acceptance_length == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(["data: [DONE]\n\n"]), "sent no usage"),
        (Script(chat_events("x", usage=None)), "sent no usage"),
        (Script(["data: {nonsense\n\n"]), "no OpenAI answer"),
        (Script([event(error={"message": "too long"})]), "too long"),
        (Script(["no such model"], status=404), "answered 404: no such model"),
    ],
)
def test_what_cannot_be_counted_is_refused(script: Script, message: str) -> None:
    with serving(script) as url, pytest.raises(RequestError, match=message):
        ServerArm(url).measure(PROMPT, PARAMS, chat=True)


def test_addresses_are_checked_before_measuring() -> None:
    with pytest.raises(UsageError, match="not an http URL"):
        ServerArm("localhost:8080")
    with serving(Script()) as url:
        pass
    with pytest.raises(ResourceError, match="no OpenAI-compatible server"):
        ServerArm(url)
