"""Answers over HTTP: the text of the Python API, streamed or whole, in the shapes that clients expect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.core import Completion
from paceline.server import reply
from support.live_server import TEMPLATE, Live, chat_llm, live_server
from support.stub_target import ScriptedRule
from support.tiny_tokenizer import EOS, VOCAB_SIZE, tiny_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "abcabc"}]
TRANSCRIPTS = Path(__file__).parent / "transcripts"

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "speculation": {"off": True}},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 20},
    {"temperature": 1.0, "seed": -3, "top_p": 0.8, "verification": "rejection", "speculation": {"off": True}},
    {"temperature": 1.0, "seed": 2**63, "min_p": 0.1},
    {"temperature": 0.7, "seed": 4, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 0, "repetition_penalty": 1.8},
    {"temperature": 0, "logit_bias": {"97": 90.0}},
    {"temperature": 2.0, "seed": 5, "stop": "\N{REPLACEMENT CHARACTER}"},
    {"temperature": 2.0, "seed": 6, "stop": ["a", "bc"]},
    {"temperature": 2.0, "seed": 7, "stop_token_ids": list(range(64)), "min_tokens": 9},
    {"temperature": 2.0, "seed": 8, "ignore_eos": True, "logit_bias": {str(EOS): 8}},
    {"temperature": 2.0, "seed": 8, "logit_bias": {str(EOS): 8}},
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(chat_llm()) as running:
        yield running


def reference(live: Live, prompt: Any, options: dict[str, Any]) -> Completion:
    """What the Python API writes."""
    own = {name: value for name, value in options.items() if name != "speculation"}
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    return live.llm.generate(prompt, SamplingParams(max_tokens=40, **own), speculate="off")


def joined(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def test_the_options_below_name_every_sampling_parameter() -> None:
    named = {name for options in OPTIONS for name in options} - {"speculation"}
    assert named | {"max_tokens", "n", "logprobs"} == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_streamed_whole_and_python_write_the_same(live: Live, options: dict[str, Any]) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "abcabc"})):
        expected = reference(live, *prompt.values(), options)  # type: ignore[arg-type]
        body = prompt | {"max_tokens": 40} | options
        answer = live.post(path, body).json()
        (choice,) = answer["choices"]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == expected.text
        assert choice["finish_reason"] == expected.finish_reason
        assert choice["stop_reason"] == expected.stop_reason
        assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens
        assert answer["usage"]["completion_tokens"] == len(expected.tokens)
        if expected.seed is not None and "seed" in options:
            assert answer["seed"] == options["seed"]
        events = live.stream(path, body | {"stream_options": {"include_usage": True}})
        assert joined(events) == expected.text
        last = events[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (expected.finish_reason, expected.stop_reason)
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [events[-1]["usage"][c] for c in counts] == [answer["usage"][c] for c in counts]
        assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1


def test_the_default_temperature_is_one(live: Live) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 11}
    expected = reference(live, MESSAGES, {"temperature": 1.0, "seed": 11})
    assert live.post(CHAT, body).json()["choices"][0]["message"]["content"] == expected.text
    drawn = {live.post(CHAT, {"messages": MESSAGES, "max_tokens": 40}).json()["seed"] for _ in range(4)}
    assert len(drawn) == 4


def test_n_answers_use_neighbouring_seeds(live: Live) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 20, "temperature": 1.5, "n": 3}
    expected = [reference(live, MESSAGES, {"temperature": 1.5, "seed": 20 + i}) for i in range(3)]
    answer = live.post(CHAT, body).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in answer["choices"]] == [e.text for e in expected]
    assert answer["usage"]["prompt_tokens"] == expected[0].prompt_tokens
    assert answer["usage"]["completion_tokens"] == sum(len(e.tokens) for e in expected)
    events = live.stream(CHAT, body)
    assert [joined(events, i) for i in range(3)] == [e.text for e in expected]
    finished = [c["index"] for event in events for c in event["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    assert sum("timings" in event for event in events) == 1
    assert "timings" in events[-1]


def test_prompts_as_text_as_ids_and_as_lists(live: Live) -> None:
    texts = ["abcabc", "xyz"]
    ids = [tiny_tokenizer().encode(text) for text in texts]
    expected = [reference(live, text, {"temperature": 0}).text for text in texts]
    body = {"max_tokens": 40, "temperature": 0}
    for prompt in (texts, ids):
        answer = live.post(TEXT, body | {"prompt": prompt}).json()
        assert [c["text"] for c in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        events = live.stream(TEXT, body | {"prompt": prompt})
        assert [joined(events, i) for i in range(2)] == expected
    for one in (texts[0], ids[0]):
        assert live.post(TEXT, body | {"prompt": one}).json()["choices"][0]["text"] == expected[0]
    bare = tiny_tokenizer().encode("abcabc", add_special=False)
    answer = live.post(TEXT, body | {"prompt": "abcabc", "add_special_tokens": False}).json()
    assert answer["choices"][0]["text"] == reference(live, bare, {"temperature": 0}).text


def test_several_prompts_with_several_answers(live: Live) -> None:
    body = {"prompt": ["ab", "xy"], "n": 2, "seed": 9, "temperature": 1.5, "max_tokens": 40}
    expected = [
        reference(live, prompt, {"temperature": 1.5, "seed": seed}).text
        for prompt in ("ab", "xy")
        for seed in (9, 10)
    ]
    answer = live.post(TEXT, body).json()
    assert [c["text"] for c in answer["choices"]] == expected
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 6
    assert [joined(live.stream(TEXT, body), i) for i in range(4)] == expected


def test_echo_puts_the_prompt_in_front(live: Live) -> None:
    body = {"prompt": "abcabc", "temperature": 0, "max_tokens": 5}
    plain = live.post(TEXT, body).json()["choices"][0]["text"]
    assert live.post(TEXT, body | {"echo": True}).json()["choices"][0]["text"] == "abcabc" + plain
    assert joined(live.stream(TEXT, body | {"echo": True})) == "abcabc" + plain
    ids = tiny_tokenizer().encode("abcabc")
    nothing = live.post(TEXT, {"prompt": ids, "echo": True, "max_tokens": 0}).json()
    assert nothing["choices"][0]["text"] == "abcabc"
    assert nothing["usage"]["completion_tokens"] == 0


def test_chat_logprobs_carry_bytes_that_join_to_the_text(live: Live) -> None:
    body = {"messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 40, "logprobs": True}
    expected = reference(live, MESSAGES, {"temperature": 1.0, "seed": 3, "logprobs": 4})
    whole = live.post(CHAT, body | {"top_logprobs": 4}).json()["choices"][0]["logprobs"]
    assert whole["refusal"] is None
    found = whole["content"]
    assert expected.logprobs is not None
    assert [entry["logprob"] for entry in found] == [one.logprob for one in expected.logprobs]
    tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in found]
    assert tops == [[value for _, value in one.top] for one in expected.logprobs]
    data = b"".join(bytes(entry["bytes"]) for entry in found)
    assert data.decode("utf-8", "replace") == expected.text
    assert found[0]["token"] == bytes(found[0]["bytes"]).decode("utf-8", "replace")
    events = live.stream(CHAT, body | {"top_logprobs": 4})
    choices = [event["choices"][0] for event in events]
    assert [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]] == found
    none = live.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[]] * len(none)
    assert live.post(CHAT, body | {"logprobs": False}).json()["choices"][0]["logprobs"] is None


def test_completion_logprobs_say_where_each_token_stands(live: Live) -> None:
    script = [*b"ab", *"é".encode(), 256, 257, ord("c"), EOS]  # an emoji of two tokens among them
    with live_server(chat_llm(ScriptedRule(VOCAB_SIZE, script, start=2, after=EOS))) as scripted:
        body = {"prompt": "x", "temperature": 0, "logprobs": 2}
        answer = scripted.post(TEXT, body).json()["choices"][0]
        assert answer["text"] == "abé😀c"
        found = answer["logprobs"]
        assert found["tokens"] == [
            "a", "b", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "c", "</s>",
        ]  # fmt: skip
        assert found["text_offset"] == [0, 1, 2, 2, 3, 3, 4, 5]
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == 8
        assert found["top_logprobs"][0]["a"] == found["token_logprobs"][0]
        streamed = [e["choices"][0]["logprobs"] for e in scripted.stream(TEXT, body)]
        for name, values in found.items():
            assert [value for part in streamed if part for value in part[name]] == values
        assert all(len(tops) in (2, 3) for tops in found["top_logprobs"])
        bare = scripted.post(TEXT, body | {"logprobs": 0}).json()["choices"][0]["logprobs"]
        assert bare["top_logprobs"] == [None] * 8


def test_usage_tells_of_the_cache_and_of_predictions(live: Live) -> None:
    body = {"prompt": "a prompt of its own, long enough for pages", "temperature": 0, "max_tokens": 30}
    first = live.post(TEXT, body).json()
    again = live.post(TEXT, body).json()
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": first["timings"]["cache_n"]}
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == again["usage"]["prompt_tokens"] - 1 == again["timings"]["cache_n"]
    assert again["timings"]["prompt_n"] == 1
    text = first["choices"][0]["text"]
    with live_server(chat_llm()) as fresh:  # whose other drafters have learnt nothing
        plain = fresh.post(TEXT, body).json()["usage"]["completion_tokens_details"]
        assert plain["accepted_prediction_tokens"] == plain["rejected_prediction_tokens"] == 0
        content = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:] + "and more"}]
        asked = body | {
            "prediction": {"type": "content", "content": content},
            "speculation": {"drafter": "prediction"},
        }
        answer = fresh.post(TEXT, asked).json()
    assert answer["choices"][0]["text"] == text
    details = answer["usage"]["completion_tokens_details"]
    by = answer["metrics"]["speculative_decoding"]["by_drafter"]["prediction"]
    assert details["accepted_prediction_tokens"] == by["accepted"] > 0
    assert details["rejected_prediction_tokens"] == by["drafted"] - by["accepted"]


def test_the_client_may_choose_how_to_speculate(live: Live) -> None:
    live.llm.clear()
    body = {"temperature": 0}
    longest = live.llm.generate("abcabcabcabc", SamplingParams(max_tokens=60, **body), speculate="off")
    for speculation in ({"off": True}, {"drafter": "off"}, {"max_draft": 0}):
        answer = live.post(
            TEXT,
            {"prompt": "abcabcabcabc", "max_tokens": 60, "speculation": speculation} | body,
        ).json()
        metrics = answer["metrics"]["speculative_decoding"]
        assert metrics["num_draft_tokens"] == 0
        assert metrics["passes"] == 59
        assert answer["choices"][0]["text"] == longest.text
    for names in ("ngram", ["ngram"], ["suffix", "ngram"], "auto"):
        answer = live.post(
            TEXT,
            {"prompt": "abcabcabcabc", "max_tokens": 60, "speculation": {"drafter": names}} | body,
        ).json()
        metrics = answer["metrics"]["speculative_decoding"]
        assert metrics["num_draft_tokens"] > 0
        assert set(metrics["by_drafter"]) <= ({"suffix", "ngram"} if names != "ngram" else {"ngram"})
        assert answer["choices"][0]["text"] == longest.text
    one = live.post(
        TEXT, {"prompt": "abcabcabcabc", "max_tokens": 60, "speculation": {"max_draft": 1}} | body
    ).json()["metrics"]["speculative_decoding"]
    assert one["num_draft_tokens"] == one["num_spec_steps"] > 0


def test_sources_say_who_guessed_each_token(live: Live) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, "return_token_sources": True}
    whole = live.post(CHAT, body).json()
    (choice,) = whole["choices"]
    told = choice["paceline"]
    text = choice["message"]["content"]
    assert "".join(told["pieces"]) == text
    assert told["tokens"][:40] == reference(live, MESSAGES, {"temperature": 0}).tokens
    assert len(told["tokens"]) == len(told["sources"]) == len(told["pieces"]) == 60
    assert set(told["sources"]) <= {"", "suffix", "prediction", "ngram"}
    assert sum(1 for source in told["sources"] if source) == whole["timings"]["draft_n_accepted"]
    assert told["speculation"] == whole["metrics"]["speculative_decoding"]
    events = live.stream(CHAT, body)
    parts = [event["paceline"] for event in events if "paceline" in event]
    assert [t for part in parts for t in part["tokens"]] == told["tokens"]
    assert "".join(piece for part in parts for piece in part["pieces"]) == text
    assert parts[-1]["speculation"]["num_draft_tokens"] == sum(part["drafted"] for part in parts)
    assert parts[-1]["speculation"]["passes"] == sum(part["passes"] for part in parts)
    for event in events:
        if "paceline" in event and event["choices"][0]["delta"].get("content"):
            assert "".join(event["paceline"]["pieces"]) == event["choices"][0]["delta"]["content"]


def test_pieces_join_to_the_text_when_a_stop_string_cuts_it(live: Live) -> None:
    script = [*b"one END two"]
    with live_server(chat_llm(ScriptedRule(VOCAB_SIZE, script, start=2))) as scripted:
        body = {"prompt": "x", "temperature": 0, "stop": "END", "return_token_sources": True}
        answer = scripted.post(TEXT, body).json()["choices"][0]
        assert answer["text"] == "one " == "".join(answer["paceline"]["pieces"])
        events = scripted.stream(TEXT, body)
        told = [event["paceline"] for event in events if "paceline" in event]
        assert joined(events) == "one " == "".join(p for t in told for p in t["pieces"])


def test_templates_get_what_they_need(live: Live) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ mood }}"

    def rendered(body: dict[str, Any]) -> str:
        ids = live.post("/tokenize", body).json()["tokens"]
        text: str = live.post("/detokenize", {"tokens": ids}).json()["prompt"]
        return text

    assert rendered({"messages": MESSAGES}) == "user:abcabc\nA:"
    assert rendered({"messages": MESSAGES, "add_generation_prompt": False}) == "user:abcabc\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered({"messages": parts}) == "user:a\nb\nA:"
    developer = [{"role": "developer", "content": "x"}]
    assert rendered({"messages": developer}) == "system:x\nA:"
    old = live.llm.chat_template
    assert old is not None
    assert old.source == TEMPLATE
    live.llm.chat_template = type(old)(template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    spoken = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"messages": spoken, "chat_template_kwargs": {"mood": "glad"}}
    try:
        assert "'arguments': {'a': 1}" in rendered(body)
        assert rendered(body).endswith("glad")
        call["function"]["arguments"] = "{a}"  # type: ignore[index]
        assert "no JSON" in live.post(CHAT, body).json()["error"]["message"]
    finally:
        live.llm.chat_template.close()
        live.llm.chat_template = old


def test_tokens_of_a_prompt_and_back(live: Live) -> None:
    ids = tiny_tokenizer().encode("Hi 😀")
    found = live.post("/tokenize", {"prompt": "Hi 😀", "return_token_strs": True}).json()
    assert found["tokens"] == ids
    assert found["count"] == len(ids)
    assert found["max_model_len"] == 512
    assert found["token_strs"][:4] == ["<s>", "H", "i", " "]
    assert live.post("/detokenize", {"tokens": ids}).json() == {"prompt": "<s>Hi 😀"}
    bare = live.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False}).json()
    assert bare["tokens"] == [*b"Hi"]


def test_models_and_version(live: Live) -> None:
    (card,) = live.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("stub", "model", "paceline")
    assert card["max_model_len"] == 512
    assert live.get("/v1/models/stub").json() == card
    assert live.get("/version").json() == {"version": reply.VERSION}


def test_many_at_once_write_what_each_writes_alone(live: Live) -> None:
    bodies = [
        {"prompt": "abc"[i % 3] * (i + 1), "seed": i, "temperature": i % 2, "max_tokens": 40, "n": 1 + i % 2}
        for i in range(16)
    ]

    def ask(body: dict[str, Any]) -> tuple[Any, Any]:
        answer = live.post(TEXT, body).json()
        return [(c["text"], c["finish_reason"]) for c in answer["choices"]], answer["usage"][
            "completion_tokens"
        ]

    serial = [ask(body) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, bodies)) == serial
        streams = pool.map(lambda body: live.stream(TEXT, body), bodies)
        for events, (texts, _) in zip(streams, serial, strict=True):
            assert [joined(events, i) for i in range(len(texts))] == [text for text, _ in texts]


def transcript(live: Live, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes of an answer, with what differs from run to run replaced."""

    class Fixed:
        hex = "0" * 32

    monkeypatch.setattr(reply.uuid, "uuid4", Fixed)
    monkeypatch.setattr(reply.time, "time", lambda: 1700000000.9)
    monkeypatch.setattr(reply, "VERSION", "1.2.3")
    data = live.post(path, body).content
    return re.sub(rb'("\w+_(?:ms|per_second)"):[\d.]+', rb"\1:0.0", data)


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("chat", CHAT, {}),
        ("chat-usage", CHAT, {"stream_options": {"include_usage": True}}),
        ("chat-logprobs", CHAT, {"logprobs": True, "top_logprobs": 1, "max_tokens": 2}),
        ("chat-sources", CHAT, {"return_token_sources": True, "stop": "😀"}),
        ("completion", TEXT, {}),
        ("completion-usage", TEXT, {"stream_options": {"include_usage": True}, "echo": True}),
        ("whole-chat", CHAT, {"stream": False}),
        ("whole-completion", TEXT, {"stream": False}),
    ],
)
def test_the_bytes_of_an_answer(
    name: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [*b'Say "', 256, 257, *b'"\n', EOS]
    start = 9 if path == CHAT else 2  # behind BOS and the prompt
    llm = chat_llm(ScriptedRule(VOCAB_SIZE, script, start=start, after=EOS))
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    )
    with live_server(llm) as live:
        asked = {"stream": True, "temperature": 0, "seed": 7, "speculation": {"off": True}} | prompt | body
        data = transcript(live, path, asked, monkeypatch)
    assert data == (TRANSCRIPTS / f"{name}.txt").read_bytes()
