"""OpenAI's own client against the server: it must never notice that this is not OpenAI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from paceline import LLM, SamplingParams
from support.live_server import Live, chat_llm, live_server, until
from support.stub_target import ScriptedRule
from support.tiny_tokenizer import EOS, VOCAB_SIZE

MESSAGES: Any = [{"role": "user", "content": "abcabc"}]
TOOLS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if tools %}<tool_call>{% endif %}A:"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(chat_llm(context_limit=2**14, pages=2**12), api_key="k", max_queue=0) as running:
        running.client.headers["Authorization"] = "Bearer k"
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0) as made:
        yield made


def says(text: str, template: str = TOOLS_TEMPLATE) -> LLM:
    """A model that writes this and ends; its template takes tools."""
    prompt = "user:x\n<tool_call>A:"
    llm = chat_llm(ScriptedRule(VOCAB_SIZE, [*text.encode()], start=len(prompt), after=EOS))
    assert llm.chat_template is not None
    llm.chat_template = type(llm.chat_template)(template)
    return llm


def test_chat(live: Live, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="stub", messages=MESSAGES, temperature=0, max_completion_tokens=20
    )
    expected = live.llm.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=20))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens_details is not None
    raw = client.chat.completions.with_raw_response.create(model="stub", messages=MESSAGES, max_tokens=5)
    assert float(raw.headers["x-tokens-per-second"]) > 0


def test_stream(live: Live, client: openai.OpenAI) -> None:
    expected = live.llm.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=20))
    chunks = list(
        client.chat.completions.create(
            model="stub",
            messages=MESSAGES,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    entries = [
        e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()
    ]
    assert len(entries) == 20


def test_the_streaming_helper_puts_the_answer_together(live: Live, client: openai.OpenAI) -> None:
    expected = live.llm.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=20))
    with client.chat.completions.stream(
        model="stub", messages=MESSAGES, temperature=0, max_tokens=20
    ) as stream:
        stream.until_done()
        snapshot = stream.current_completion_snapshot
    assert snapshot.choices[0].message.content == expected.text


def test_completions(live: Live, client: openai.OpenAI) -> None:
    expected = live.llm.generate("abcabc", SamplingParams(temperature=0, max_tokens=20))
    answer = client.completions.create(
        model="stub", prompt="abcabc", temperature=0, max_tokens=20, logprobs=1
    )
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or ()) == 20
    stream = client.completions.create(
        model="stub", prompt="abcabc", temperature=0, max_tokens=20, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["stub"]
    assert client.models.retrieve("stub").id == "stub"


def test_structured_output(client: openai.OpenAI) -> None:
    schema: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "point",
            "schema": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "minimum": 0, "maximum": 99},
                    "ok": {"type": "boolean"},
                },
                "required": ["x", "ok"],
                "additionalProperties": False,
            },
        },
    }
    ask: Any = {"model": "stub", "messages": MESSAGES, "seed": 3, "max_tokens": 200}
    answer = client.chat.completions.create(**ask, response_format=schema)
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"x", "ok"}
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**ask, response_format=schema, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    assert text == answer.choices[0].message.content
    for extra, allowed in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "[ab]c"}, ("ac", "bc")),
        ({"structured_outputs": {"choice": ["left"]}}, ("left",)),
        ({"grammar": 'start: "x" "y"'}, ("xy",)),
        ({"guided_grammar": 'start: "x" "y"'}, ("xy",)),
        ({"guided_json": {"const": 5}}, ("5",)),
    ):
        answer = client.chat.completions.create(**ask, extra_body=extra)
        assert answer.choices[0].message.content in allowed
        assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(**ask, response_format={"type": "json_object"}, temperature=0)
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")
    for bad in (
        {"guided_regex": "("},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_json": {"type": "nothing"}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object"}, "grammar": 'start: "x"'},
        {"guided_regex": "(a{1000}){1000}"},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**ask, extra_body=bad)


@pytest.mark.parametrize("stream", [True, False])
def test_tool_calls_are_found(stream: bool) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call>'
    with live_server(says(f"Let me see.\n{call}\n{call}")) as live:
        for more, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
            message, reason = asked(live, stream, tools=TOOLS, **more)
            assert message["content"].strip() == "Let me see."
            assert [c["function"]["name"] for c in message["tool_calls"]] == ["add"] * count
            assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [
                {"a": 1, "b": 22}
            ] * count
            assert len({c["id"] for c in message["tool_calls"]}) == count
            assert all(c["type"] == "function" for c in message["tool_calls"])
            assert reason == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_no_call_is_plain_text(stream: bool) -> None:
    with live_server(says("No <tool> is needed.")) as live:
        message, reason = asked(live, stream, tools=TOOLS)
        assert message["content"] == "No <tool> is needed."
        assert not message.get("tool_calls")
        assert reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_tool_choice_forces_a_call(stream: bool) -> None:
    with live_server(says("I would rather not.")) as live:
        named = {"type": "function", "function": {"name": "add"}}
        for choice, expected in (("required", "tool_calls"), (named, "stop")):
            message, reason = asked(
                live, stream, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=400
            )
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "add"
            assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
            assert not message["content"]
            assert reason == expected
        message, reason = asked(live, stream, tools=TOOLS, tool_choice="none")
        assert not message.get("tool_calls")


def test_tools_that_cannot_be_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="writes no tool calls in a known way"):
        client.chat.completions.create(model="stub", messages=MESSAGES, tools=TOOLS)
    with pytest.raises(openai.BadRequestError, match="there are no tools"):
        client.chat.completions.create(model="stub", messages=MESSAGES, tool_choice="required")
    with live_server(says("x")) as live:
        other = {"type": "function", "function": {"name": "sub"}}
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": other}
        assert "'sub'" in live.post("/v1/chat/completions", body).json()["error"]["message"]


def asked(live: Live, stream: bool, **body: Any) -> tuple[dict[str, Any], str]:
    """(message, finish reason) as the client has it."""
    ask: Any = {"model": "stub", "messages": [{"role": "user", "content": "x"}], "temperature": 0} | body
    with openai.OpenAI(base_url=live.url + "/v1", api_key="-", max_retries=0) as client:
        if not stream:
            choice = client.chat.completions.create(**ask).choices[0]
            return choice.message.model_dump(), choice.finish_reason
        with client.chat.completions.stream(**ask) as events:
            events.until_done()
            whole = events.current_completion_snapshot.choices[0]
        return whole.message.model_dump(), str(whole.finish_reason)


def test_errors_are_the_clients_own(live: Live, client: openai.OpenAI) -> None:
    def ask(**more: Any) -> None:
        client.chat.completions.create(**{"model": "stub", "messages": MESSAGES, "max_tokens": 4} | more)

    with pytest.raises(openai.BadRequestError, match="temperature is 101"):
        ask(temperature=101)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'") as found:
        ask(model="gpt-4")
    assert found.value.code == "model_not_found"
    long: Any = [{"role": "user", "content": "a" * 20_000}]
    with pytest.raises(openai.APIStatusError, match="16384") as caught:
        ask(messages=long)
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="128 texts are asked for at once; the limit is 32"):
        ask(n=128)
    target: Any = live.llm.engine.target
    target.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, n=32)
        until(lambda: live.stats().running + live.stats().waiting == 32)
        with pytest.raises(openai.RateLimitError):
            ask()
        target.gate.set()
        waiting.result()
    with (
        openai.OpenAI(base_url=live.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    target.fail = RuntimeError("secret")
    with pytest.raises(openai.InternalServerError):
        ask()
    target.fail = RuntimeError("secret")
    with pytest.raises(openai.APIError, match="the server failed on this request"):
        list(client.chat.completions.create(model="stub", messages=MESSAGES, stream=True))


def test_a_cancelled_task_frees_its_slot(live: Live) -> None:
    async def go(stream: bool) -> None:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0) as client:
            ask: Any = {"model": "stub", "messages": MESSAGES, "max_tokens": 16_000, "stream": stream}
            task = asyncio.create_task(client.chat.completions.create(**ask, extra_body={"ignore_eos": True}))
            while live.stats().running == 0:
                await asyncio.sleep(0.005)
            if stream:
                answer = await task
                async for _ in answer:
                    break
                await answer.close()
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            while not live.idle():
                await asyncio.sleep(0.005)

    for stream in (True, False):
        asyncio.run(go(stream))
    until(live.idle)


def test_many_async_requests_at_once(live: Live) -> None:
    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0) as client:
            ask: Any = {"model": "stub", "max_tokens": 20, "temperature": 1.0}
            answers = await asyncio.gather(
                *(client.completions.create(**ask, prompt="abc", seed=seed) for seed in range(12))
            )
            return [answer.choices[0].text for answer in answers]

    expected = [
        live.llm.generate("abc", SamplingParams(max_tokens=20, seed=seed), speculate="off").text
        for seed in range(12)
    ]
    assert asyncio.run(go()) == expected
