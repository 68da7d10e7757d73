"""What cannot be served is refused in OpenAI's shape, by name, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from paceline.server.schema import ChatRequest, CompletionRequest
from support.live_server import Live, chat_llm, live_server, raw_post, read_all, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "abcabc"}]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(chat_llm(context_limit=128), max_body_bytes=20_000, max_draft=8) as running:
        yield running


@pytest.fixture(autouse=True)
def _still_serving(live: Live) -> Iterator[None]:
    yield
    answer = live.post(TEXT, {"prompt": "ab", "max_tokens": 2})
    assert answer.status_code == 200
    until(live.idle)


def refused(answer: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of an error of OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"].endswith("_error")
    assert len(error["message"]) < 1000
    if param is not None:
        assert error["param"] == param
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", 101, "temperature is 101"),
        ("temperature", -1, "temperature is -1"),
        ("temperature", "hot", "temperature is 'hot'; it should be a valid number"),
        ("temperature", True, "temperature is True; it should be a valid number"),
        ("temperature", 10**400, "temperature"),
        ("top_p", 0, "top_p is 0"),
        ("top_k", -2, "top_k is -2"),
        ("top_k", 1.5, "top_k is 1.5; it should be a valid integer"),
        ("min_p", 2, "min_p is 2"),
        ("n", 0, "n is 0"),
        ("n", 129, "n is 129"),
        ("max_tokens", -1, "max_tokens is -1"),
        ("max_tokens", "7", "max_tokens is '7'; it should be a valid integer"),
        ("min_tokens", 2**31, "min_tokens is"),
        ("seed", 2**64, "seed is"),
        ("seed", -(2**63) - 1, "seed is"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1"),
        ("frequency_penalty", -2.1, "frequency_penalty is -2.1"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("stop", 5, "stop is 5; it should be a valid string, or a valid list"),
        ("stop", [""], "empty string"),
        ("stop", ["a", None], "stop"),
        ("stop", ["a" * 4000, "b" * 97], "stop has 4097 characters; give at most 4096 in all"),
        ("prediction", {"type": "content", "content": "a" * 9000}, "the prediction has at least"),
        ("stop_token_ids", [-1], "stop_token_ids[0] is -1"),
        ("logit_bias", {"x": 1}, "logit_bias names 'x'"),
        ("logit_bias", {"262": 1}, "token ids are 0 to 261"),
        ("logit_bias", {"5": 1e5}, "logit_bias[5] is 100000.0"),
        ("logit_bias", {"5": None}, "logit_bias"),
        ("verification", "lossy", "verification is 'lossy'"),
        ("stream", "yes", "stream is 'yes'; it should be a valid boolean"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream: true"),
        ("speculation", {"drafter": "medusa"}, "there is no drafter 'medusa'"),
        ("speculation", {"drafter": "suffix:file=/etc/passwd"}, "there is no drafter"),
        ("speculation", {"drafter": ["auto", "suffix"]}, "'suffix' is given twice"),
        ("speculation", {"drafter": []}, "no drafter is given"),
        ("speculation", {"max_draft": 9}, "speculation.max_draft is 9; this server allows 0 to 8"),
        ("speculation", {"off": True, "drafter": "ngram"}, "speculation.off excludes"),
        ("speculation", {"fast": True}, "unknown field 'speculation.fast'"),
        ("timeout", 0, "timeout is 0"),
        ("temprature", 1, "unknown field 'temprature'; did you mean 'temperature'?"),
        ("n_predict", 1, "use max_tokens"),
        ("best_of", 2, "not supported"),
        ("store", True, "store is True"),
    ],
)
def test_a_field_that_cannot_be_is_named(live: Live, field: str, value: Any, words: str) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "ab"})):
        message = refused(live.post(path, prompt | {field: value}), 400)
        assert words in message, message


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "messages is []"),
        ({"messages": "hello"}, "messages", "messages is 'hello'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user"}]}, None, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "image_url"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        (
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 101},
            "top_logprobs",
            "top_logprobs is 101",
        ),
        (
            {"messages": MESSAGES, "max_completion_tokens": -1},
            "max_completion_tokens",
            "max_completion_tokens is -1",
        ),
        ({"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, None, "give one of them"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "own"),
        ({"messages": MESSAGES, "functions": []}, "functions", "use tools"),
        ({"messages": MESSAGES, "prediction": {"type": "content"}}, "prediction.content", "missing"),
    ],
)
def test_a_chat_that_cannot_be(live: Live, body: dict[str, Any], param: str | None, words: str) -> None:
    assert words in refused(live.post(CHAT, body), 400, param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [262]}, "token id 262, outside 0 to 261"),
        ({"prompt": ["a"] * 1025}, "the limit is 1024"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo cannot be combined with logprobs"),
        ({"prompt": "a", "suffix": "b"}, "not supported"),
    ],
)
def test_a_prompt_that_cannot_be(live: Live, body: dict[str, Any], words: str) -> None:
    assert words in refused(live.post(TEXT, body), 400)


def test_a_prompt_that_is_too_long_names_both_numbers(live: Live) -> None:
    message = refused(live.post(TEXT, {"prompt": "a" * 200}), 413)
    assert "201 tokens" in message
    assert "128" in message
    longest = [{"role": "user", "content": "a" * 200}]
    assert "128" in refused(live.post(CHAT, {"messages": longest, "stream": True}), 413)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the body is missing"),
        (b"{", "not valid JSON"),
        (b"[]", "the body is []; send a JSON object"),
        (b"null", "send a JSON object"),
        (b'"text"', "send a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity is no JSON number"),
        (b'{"prompt": "a", "temperature": 1e999}', "beyond what a number can hold"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"metadata": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}", "nested deeper than 64 levels"),
        (b'{"metadata": {"a":' + b"[" * 300 + b"]" * 300 + b"}}", "nested deeper than 64 levels"),
        (b"[" * 9000, "nested deeper than 64 levels"),
    ],
)
def test_a_body_that_is_no_json(live: Live, data: bytes, words: str) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        answer = live.client.post(path, content=data, headers=JSON)
        assert words in refused(answer, 400)


def test_variables_of_a_template_may_have_any_name(live: Live) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}
    expected = live.post(CHAT, body).json()["choices"]
    for name in ("tokenizer", "self", "limit", "kwargs", "cls", "value", "__class__", "two words", ""):
        answer = live.post(CHAT, body | {"chat_template_kwargs": {name: "x"}})
        assert answer.json().get("choices") == expected, name


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [1] * 9000}, "messages[0] is 1; it should be a valid dictionary"),
        (CHAT, {"messages": MESSAGES, "stop": [1] * 9000}, "stop"),
        (TEXT, {"prompt": [0.5] * 4000}, "prompt"),
        (TEXT, {"prompt": [[0.5]] * 2000}, "prompt"),
    ],
)
def test_of_a_thousand_faults_one_is_reported(path: str, body: dict[str, Any], words: str) -> None:
    """Each of them would be a Python object with its place and its message."""
    with pytest.raises(ValidationError) as caught:
        (ChatRequest if path == CHAT else CompletionRequest).model_validate(body)
    assert caught.value.error_count() <= 4  # one for each way to read the field


def test_objects_of_very_many_fields_are_refused() -> None:
    with live_server(chat_llm()) as live:
        for place in ({}, {"metadata": {}}):
            body: dict[str, Any] = {"prompt": "a"} | place
            body.get("metadata", body).update({f"k{i}": 1 for i in range(2**16 + 1)})
            assert "fields; the limit is 65536" in refused(live.post(TEXT, body), 400)
        many = {f"k{i}": 1 for i in range(2**16)}
        assert live.post(TEXT, {"prompt": "a", "max_tokens": 1, "metadata": many}).status_code == 200


def test_texts_that_cannot_fit_are_refused_unread(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    pieces = live.llm.tokenizer._pieces
    monkeypatch.setattr(type(pieces), "encode", lambda _, text: read.append(text) or [])
    longest = "a" * 15_000
    for path, prompt in (
        (TEXT, {"prompt": longest}),
        (CHAT, {"messages": [{"role": "user", "content": longest}]}),
    ):
        message = refused(live.post(path, prompt), 413)
        assert "the prompt has at least" in message
        assert "the context limit is 128" in message
    assert read == []


def test_text_that_is_no_unicode(live: Live) -> None:
    for path in (TEXT, "/tokenize"):
        answer = live.client.post(path, content=b'{"prompt": "\\ud800"}', headers=JSON)
        assert "half of a surrogate pair" in refused(answer, 400)
    answer = live.client.post(TEXT, content=b'{"prompt": "a", "\\ud800": 1}', headers=JSON)
    assert "half of a surrogate pair" in refused(answer, 400)
    answer = live.client.post("/tokenize", content=b'{"prompt": "\\ud83d\\ude00"}', headers=JSON)
    assert answer.json()["count"] == 3  # BOS, and two tokens of two bytes


def test_a_body_that_is_not_marked_as_json(live: Live) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = live.client.post(TEXT, content=b'{"prompt":"a"}', headers={"Content-Type": kind})
        assert "Content-Type: application/json" in refused(answer, 415)


def test_a_body_that_is_too_large(live: Live) -> None:
    message = refused(live.post(TEXT, {"prompt": "a" * 30_000}), 413)
    assert "30013 bytes" in message
    assert "20000" in message

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"a" * 1000

    assert "20000" in refused(live.client.post(TEXT, content=parts(), headers=JSON), 413)


def test_unknown_models_routes_and_methods(live: Live) -> None:
    message = refused(live.post(TEXT, {"prompt": "a", "model": "gpt-4"}), 404, "model")
    assert message == "there is no model 'gpt-4'; this server has stub"
    refused(live.get("/v1/models/gpt-4"), 404)
    assert "/docs" in refused(live.get("/v1/embeddings"), 404)
    assert "method" in refused(live.get(CHAT), 405)
    assert live.get(CHAT).headers["allow"] == "POST"


def test_tokenize_wants_exactly_one_of_two(live: Live) -> None:
    assert "either" in refused(live.post("/tokenize", {}), 400)
    assert "either" in refused(live.post("/tokenize", {"prompt": "a", "messages": MESSAGES}), 400)
    refused(live.post("/detokenize", {"tokens": [999]}), 400)


def test_a_failure_of_ours_is_a_500_without_details(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(live.llm.tokenizer, "encode", broken)
    assert "secret" not in refused(live.post(TEXT, {"prompt": "ab"}), 500)
    monkeypatch.undo()


def test_a_pass_that_fails_ends_its_requests_only(live: Live) -> None:
    target: Any = live.llm.engine.target
    target.fail = RuntimeError("secret")
    assert "secret" not in refused(live.post(TEXT, {"prompt": "ab"}), 500)
    target.fail = RuntimeError("secret")
    (event,) = live.stream(TEXT, {"prompt": "ab"})
    assert set(event) == {"error"}
    assert event["error"]["code"] == "internal_error"


def test_garbage_instead_of_http(live: Live) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nA: " + b"b" * 100_000):
        with live.connect() as connection:
            connection.sendall(data)
            reply = connection.recv(1000)
            assert reply.startswith(b"HTTP/1.1 400")


def test_a_request_by_hand_is_answered(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(raw_post(TEXT, {"prompt": "ab", "max_tokens": 1}, "Connection: close"))
        reply = read_all(connection)
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"server:" not in head.lower()
        assert json.loads(body)["usage"]["completion_tokens"] == 1
