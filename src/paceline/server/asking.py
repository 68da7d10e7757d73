"""From a request's body to jobs for the engine. Takes a while for long prompts; runs on a worker thread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from paceline.core import Constraint, SamplingParams
from paceline.drafters import registry
from paceline.engine.llm import Speculate
from paceline.errors import PacelineError, PromptTooLongError, RequestError, suggest
from paceline.server.backend import Model
from paceline.server.failures import ApiError
from paceline.server.feed import Job
from paceline.server.schema import (
    ChatRequest,
    CompletionRequest,
    Message,
    Prediction,
    ResponseFormat,
    Sampling,
    TokenizeRequest,
    Tool,
    ToolChoice,
)
from paceline.server.wire import shown
from paceline.text.grammar import Kind, compile_constraint
from paceline.text.tool_calls import Format, ToolCallParser, detect, force_calls

_PLAIN = [f.name for f in fields(SamplingParams) if f.name not in ("logit_bias", "logprobs")]
_MOST_PROMPTS = 1024


class Chat(NamedTuple):
    """A chat request, ready to be submitted and to be answered.

    Attributes:
        parser: makes what finds calls of tools; None where there are no tools.
        forced: the caller named the function to call.
    """

    job: Job
    parser: Callable[[], ToolCallParser] | None
    forced: bool


def chat_job(body: ChatRequest, model: Model, ceiling: int) -> Chat:
    """What one chat request means.

    Raises:
        ApiError: a field that means nothing.
        PacelineError: what the template, the tokenizer or the grammar refuses.
    """
    tokens = _same("max_tokens", body.max_tokens, "max_completion_tokens", body.max_completion_tokens)
    if body.top_logprobs is not None and not body.logprobs:
        raise _bad("top_logprobs", "top_logprobs needs logprobs: true")
    more = {"max_tokens": tokens, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    names = {"logprobs": "top_logprobs"}
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    tools = [] if body.tool_choice == "none" else [_plain(tool) for tool in body.tools or ()]
    form = _form(model) if tools else None
    job = Job(
        prompt=chat_ids(
            model,
            body.messages,
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            kwargs=body.chat_template_kwargs,
            limit=model.llm.context_limit,
        ),
        params=_params(body, model, more, names),
        constraint=_either(_constraint(body, model), _calls(body, tools, form, model)),
        prediction=_prediction(body.prediction, model),
        **_speculation(body, ceiling),
    )
    functions = [tool["function"]["name"] for tool in tools]
    parser = None if form is None else partial(ToolCallParser, form, functions)
    return Chat(job, parser, isinstance(body.tool_choice, ToolChoice))


def _form(model: Model) -> Format:
    template = model.llm.chat_template
    form = None if template is None else detect(template.source)
    if form is None:
        text = "this model's template writes no tool calls in a known way (Hermes, Qwen, Llama 3)"
        raise _bad("tools", f"{text}; leave tools out, or give another --chat-template")
    return form


def _calls(
    body: ChatRequest, tools: Sequence[Mapping[str, Any]], form: Format | None, model: Model
) -> Constraint | None:
    """What tool_choice makes of the answer."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if form is None:
        raise _bad("tool_choice", "tool_choice asks for a call, and there are no tools; give tools")
    plain = choice.model_dump() if isinstance(choice, ToolChoice) else str(choice)
    parallel = body.parallel_tool_calls is not False
    try:
        return force_calls(plain, tools, form, model.llm.tokenizer, parallel=parallel)
    except RequestError as error:
        raise _bad("tool_choice", f"{error.message}; {error.hint}") from None


def _either(one: Constraint | None, other: Constraint | None) -> Constraint | None:
    if one is not None and other is not None:
        raise _bad("tool_choice", "tool_choice asks for a call, and the text is to follow something else")
    return one if other is None else other


def completion_jobs(body: CompletionRequest, model: Model, ceiling: int) -> tuple[list[Job], list[str]]:
    """A job for each prompt of a completions request, and what each answer echoes.

    Raises as `chat_job` does.
    """
    if body.echo and body.logprobs is not None:
        raise _bad("echo", "echo cannot be combined with logprobs: the prompt has none; leave one out")
    prompts = _prompts(body.prompt)
    if len(prompts) > _MOST_PROMPTS:
        raise _bad("prompt", f"there are {len(prompts)} prompts; the limit is {_MOST_PROMPTS}")
    params = _params(body, model, {"logprobs": body.logprobs}, {})
    constraint = _constraint(body, model)
    shared: dict[str, Any] = {
        "params": params,
        "prediction": _prediction(body.prediction, model),
        **_speculation(body, ceiling),
    }
    jobs, echoes = [], []
    for prompt in prompts:
        ids = _ids(prompt, model, body.add_special_tokens is not False, model.llm.context_limit)
        fresh = None if constraint is None else constraint.fresh()
        jobs.append(Job(prompt=ids, constraint=fresh, **shared))
        echoes.append(_echo(prompt, model) if body.echo else "")
    return jobs, echoes


def chat_ids(
    model: Model,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool | None,
    kwargs: Mapping[str, Any] | None,
    limit: int | None = None,
) -> list[int]:
    """Token ids of a conversation, as the model's template writes it; fewer than `limit`, if it is given."""
    template = model.llm.chat_template
    if template is None:
        raise _bad("messages", "this model has no chat template; use /v1/completions, or --chat-template")
    own = {"messages", "tools", "add_generation_prompt"} & set(kwargs or {})
    if own:
        name = sorted(own)[0]
        raise _bad("chat_template_kwargs", f"chat_template_kwargs holds {name!r}; that is a field of its own")
    return template.encode(
        model.llm.tokenizer,
        [_plain_message(message, template.source) for message in messages],
        limit,
        add_generation_prompt=add_generation_prompt is not False,
        tools=tools or None,
        **(kwargs or {}),
    )


def tokenize(body: TokenizeRequest, model: Model) -> list[int]:
    """Token ids of a prompt or of a conversation. Raises as `chat_job` does."""
    if (body.prompt is None) == (body.messages is None):
        raise _bad("prompt", "give either prompt or messages")
    if body.messages is None:
        return _ids(body.prompt or "", model, body.add_special_tokens is not False, None)
    return chat_ids(
        model,
        body.messages,
        tools=[_plain(tool) for tool in body.tools or ()],
        add_generation_prompt=body.add_generation_prompt,
        kwargs=body.chat_template_kwargs,
    )


def _plain(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _plain_message(message: Message, template: str) -> dict[str, Any]:
    """A message as templates expect it: arguments of calls as objects, and no role they never heard of."""
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "developer" and "developer" not in template:
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                quoted = shown(function["arguments"])
                raise _bad("messages", f"a tool call's arguments are {quoted}, which is no JSON") from None
    return plain


def _params(
    body: Sampling, model: Model, more: Mapping[str, Any], names: Mapping[str, str]
) -> SamplingParams:
    """Sampling parameters of a body.

    Args:
        more: those that the body calls otherwise.
        names: what it calls them, where that is not their own name.
    """
    given = {name: getattr(body, name) for name in _PLAIN} | dict(more)
    values = dict(model.defaults) | {name: value for name, value in given.items() if value is not None}
    if body.logit_bias:
        values["logit_bias"] = _bias(body.logit_bias, model.llm.tokenizer.vocab_size)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        found, rest = re.match(r"(\w*)(.*)", error.message, re.DOTALL).groups()  # type: ignore[union-attr]
        field = names.get(found, found)
        raise _bad(field, f"{field}{rest}; {error.hint}") from None


def _bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size):
            limit = f"token ids are 0 to {vocab_size - 1}, written as text"
            raise _bad("logit_bias", f"logit_bias names {shown(key)}; {limit}")
        found[int(key)] = value
    return found


def _speculation(body: Sampling, ceiling: int) -> dict[str, Any]:
    """`speculate` and `max_draft` of a job. Only names are taken from outside: options of drafters name
    files on this machine."""
    asked = body.speculation
    if asked is None:
        return {"max_draft": ceiling}
    if asked.max_draft is not None and not 0 <= asked.max_draft <= ceiling:
        text = f"speculation.max_draft is {asked.max_draft}; this server allows 0 to {ceiling}"
        raise _bad("speculation.max_draft", text)
    if asked.off and asked.drafter not in (None, "off"):
        raise _bad("speculation", "speculation.off excludes speculation.drafter; leave one out")
    limit = ceiling if asked.max_draft is None else asked.max_draft
    speculate: Speculate | None = "off" if asked.off else None
    if asked.drafter is not None and not asked.off:
        names = [asked.drafter] if isinstance(asked.drafter, str) else asked.drafter
        known = [*registry.names(), "auto", "off"]
        for name in names:
            if name not in known:
                text = f"there is no drafter {shown(name)}; {suggest(name[:64], known)}"
                raise _bad("speculation.drafter", text)
        speculate = names[0] if len(names) == 1 else sorted(names)
        try:
            registry.configure(speculate, vocab_size=1)
        except PacelineError as error:
            raise _bad("speculation.drafter", f"{error.message}; {error.hint}") from None
    return {"speculate": speculate, "max_draft": limit}


def compiles(body: Sampling) -> bool:
    """Whether a grammar has to be compiled for this request."""
    choice = body.tool_choice if isinstance(body, ChatRequest) else None
    return bool(_guides(body)) or choice not in (None, "none", "auto")


def _constraint(body: Sampling, model: Model) -> Constraint | None:
    """What the text must follow, from whichever of the many fields says it."""
    found = _guides(body)
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise _bad(found[1][0], f"{names} were both given; the text can follow only one")
    name, kind, source = found[0]
    try:
        return compile_constraint(kind, source, model.llm.tokenizer)
    except RequestError as error:
        raise _bad(name, f"{name}: {error.message}; {error.hint}") from None


def _guides(body: Sampling) -> list[tuple[str, Kind, Any]]:
    """(field, kind of constraint, its source) of all that were given."""
    found: list[tuple[str, Kind, Any]] = [
        ("grammar", "grammar", body.grammar),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    if (outputs := body.structured_outputs) is not None:
        inside: list[tuple[str, Kind, Any]] = [
            ("json", "json_schema", outputs.json_),
            ("json_object", "json_object", outputs.json_object or None),
            ("regex", "regex", outputs.regex),
            ("choice", "choice", outputs.choice),
            ("grammar", "grammar", outputs.grammar),
        ]
        found += [(f"structured_outputs.{name}", kind, source) for name, kind, source in inside]
    if isinstance(body, ChatRequest) and (form := body.response_format) is not None:
        found.append(_response_format(form))
    return [guide for guide in found if guide[2] is not None]


def _response_format(form: ResponseFormat) -> tuple[str, Kind, Any]:
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise _bad("response_format", "response_format.json_schema.schema is missing")
        return ("response_format", "json_schema", form.json_schema.schema_)
    return ("response_format", "json_object", True if form.type == "json_object" else None)


def _prediction(prediction: Prediction | None, model: Model) -> list[int] | None:
    if prediction is None:
        return None
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    limit = model.llm.context_limit
    try:
        return model.llm.tokenizer.encode(text, add_special=False, limit=limit)
    except PromptTooLongError as error:
        text = f"the prediction has at least {error.tokens} tokens; the context limit is {limit}; shorten it"
        raise _bad("prediction", text) from None


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _bad("prompt", "prompt is an empty list; give at least one")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [one for one in prompt if not isinstance(one, int)]


def _ids(prompt: str | list[int], model: Model, special: bool, limit: int | None) -> list[int]:
    if isinstance(prompt, str):
        return model.llm.tokenizer.encode(prompt, add_special=special, parse_special=True, limit=limit)
    return prompt


def _echo(prompt: str | list[int], model: Model) -> str:
    return prompt if isinstance(prompt, str) else model.llm.detokenize(prompt)


def _same(first: str, one: int | None, second: str, other: int | None) -> int | None:
    if one is not None and other is not None and one != other:
        raise _bad(second, f"{first} is {one} and {second} is {other}; give one of them")
    return other if one is None else one


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
