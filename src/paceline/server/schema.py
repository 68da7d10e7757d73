"""What requests may hold. The OpenAPI document is made from these classes.

Types are strict: "1" is no number. Ranges are written down for the document only; `SamplingParams` and the
engine check them, so that each limit is stated once and its error names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field


def _between(low: float, high: float, *, above: bool = False) -> Any:
    """A range for the document; None, which every optional field takes, stays allowed."""
    return {"exclusiveMinimum" if above else "minimum": low, "maximum": high}


def _number(low: float, high: float, text: str, *, above: bool = False) -> Any:
    return Field(None, description=text, json_schema_extra=_between(low, high, above=above))


class Body(BaseModel):
    """A request body: unknown fields are refused, types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first fault is reported: a million faults take seconds and gigabytes."""

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[Many[TokenId], Field(min_length=1)]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send one more chunk, with usage and no choices")


class Speculation(Body):
    """How to speculate for this request alone. The text is the same whatever is chosen."""

    drafter: str | Many[str] | None = Field(None, description="auto, off, or names of drafters")
    max_draft: int | None = _number(0, 64, "Most draft tokens per pass; at most the server's own ceiling")
    off: bool | None = Field(None, description="true: write every token with the model alone")


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON Schema")
    json_object: bool | None = Field(None, description="true: any JSON object")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = Field(None, description="A Lark grammar, in llguidance's dialect")


class Sampling(Body):
    """Fields that all ways to generate share."""

    model: str | None = Field(None, description="A name from /v1/models; may be left out")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = _number(1, 128, "Independent answers; answer i uses seed + i")
    max_tokens: int | None = _number(0, 2**31 - 1, "Most tokens to write; default: what the context leaves")
    min_tokens: int | None = _number(0, 2**31 - 1, "No stop token before this many")
    temperature: float | None = _number(0, 100, "0 always takes the likeliest token; default 1")
    top_p: float | None = _number(0, 1, "Keep the likeliest tokens that reach this probability", above=True)
    top_k: int | None = _number(-1, 2**31 - 1, "Keep the k likeliest tokens; 0 or -1 keeps all")
    min_p: float | None = _number(0, 1, "Drop tokens less likely than this times the likeliest")
    presence_penalty: float | None = _number(-2, 2, "Taken from the logit of every token already written")
    frequency_penalty: float | None = _number(-2, 2, "The same, once per occurrence")
    repetition_penalty: float | None = _number(0, 100, "Divides logits of tokens already seen", above=True)
    logit_bias: dict[str, float] | None = Field(None, description="Token id, as text, to what is added")
    seed: int | None = _number(-(2**63), 2**64 - 1, "Default: drawn, and reported")
    stop: str | Many[str] | None = Field(None, description="End before this text")
    stop_token_ids: Many[TokenId] | None = Field(None, description="End at these ids too")
    ignore_eos: bool | None = Field(None, description="Write on past the model's own end")
    verification: Literal["coupled", "rejection"] | None = Field(
        None, description="coupled: same bytes as without speculation; rejection: same distribution"
    )
    grammar: str | None = Field(None, description="A Lark grammar, in llguidance's dialect")
    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON Schema")
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Speculation | None = None
    return_token_sources: bool | None = Field(
        None, description="Paceline's own: tell which drafter guessed each token"
    )
    timeout: float | None = Field(
        None, gt=0, le=86400, description="Paceline's own: seconds; at most what the server allows"
    )
    user: str | None = Field(None, description="Taken, and not used")
    metadata: dict[str, Any] | None = Field(None, description="Taken, and not used")
    store: Literal[False] | None = Field(None, description="Nothing is ever stored")
    service_tier: Literal["auto", "default"] | None = Field(None, description="Taken, and not used")
    safety_identifier: str | None = Field(None, description="Taken, and not used")
    prompt_cache_key: str | None = Field(None, description="Taken, and not used: equal prefixes are shared")


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: str | dict[str, Any] = Field(description="JSON text, as OpenAI has it, or the object")


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    function: CalledFunction


class Message(BaseModel):
    """One message, with content or with calls. What else a template reads may be added."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={"anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}]},
    )

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[TextPart] | None = None
    tool_calls: Many[ToolCall] | None = None


class Prediction(Body):
    """OpenAI's predicted output: text that the answer will resemble, from which drafts are taken."""

    type: Literal["content"]
    content: str | Many[TextPart]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = _number(0, 2**31 - 1, "The newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = _number(0, 100, "Likeliest alternatives per token; needs logprobs")
    response_format: ResponseFormat | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the template")
    add_generation_prompt: bool | None = Field(None, description="End with what begins an answer")
    modalities: Many[Literal["text"]] | None = None


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: str | Many[str] | Ids | Many[Ids]
    echo: bool | None = Field(None, description="Put the prompt in front of the text")
    logprobs: int | None = _number(0, 100, "Likeliest alternatives per token")
    prediction: Prediction | None = None
    add_special_tokens: bool | None = Field(None, description="Begin with BOS, where the model wants it")


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    tools: Many[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Many[TokenId]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every error, as OpenAI sends it."""

    error: ErrorBody


REFUSED: dict[str, str] = {
    "best_of": "ask for n answers and choose one",
    "suffix": "put both sides into the prompt as the model's own fill-in-the-middle format wants it",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "reasoning_effort": "pass chat_template_kwargs, if the model's template knows such a thing",
    "audio": "this server writes text only",
    "web_search_options": "this server has no search",
    "n_predict": "use max_tokens",
    "num_predict": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "use_beam_search": "beam search is not offered",
    "prompt_logprobs": "log-probabilities are given for what is generated",
    "guided_decoding_backend": "there is one backend; leave it out",
}
"""Fields that other servers have and this one has not, with what to do instead."""
