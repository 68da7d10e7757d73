"""Chat templates: messages to the prompt that a model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import ModelFileError, RequestError, suggest
from paceline.text.renderer import Renderer
from paceline.text.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TOKEN_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_BREAKERS = range(0xF0000, 0xFFFFE)  # private use: no text means anything by them

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat template of one model file; a second one for tools where the file has it.

    Attributes:
        source: the template in Jinja's language.
    """

    def __init__(
        self, source: str, *, tools: str | None = None, tokens: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self._tokens = dict(tokens or {})
        self._renderer = Renderer(source)
        self._tools_renderer = self._renderer if tools is None else Renderer(tools)
        self._sources = source + (tools or "")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate | None:
        """Return the template that `tokenizer.chat_template` holds, None where there is none.

        A `tokenizer.chat_template.tool_use` is used when tools are given.
        """
        source = metadata.get(_KEY, metadata.get(f"{_KEY}.default"))
        tools = metadata.get(f"{_KEY}.tool_use")
        if source is None:
            return None
        for key, value in ((_KEY, source), (f"{_KEY}.tool_use", tools)):
            if value is not None and not isinstance(value, str):
                raise ModelFileError(
                    f"{key} is not text but {type(value).__name__}", "download the file again"
                )
        return cls(source, tools=tools, tokens=_token_texts(metadata))

    def start(self) -> None:
        """Start the process that renders, so that the first rendering does not wait for it."""
        self._renderer.start()

    def close(self) -> None:
        """End the processes that render; a later rendering starts them again."""
        self._renderer.close()
        self._tools_renderer.close()

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt as text, special tokens written out.

        Args:
            messages: dicts with `role` and `content` (a string, or a list of {"type": "text", "text": ...}),
                and whatever else the template reads.
            add_generation_prompt: end with what begins the model's answer.
            tools: descriptions of functions the model may call.
            kwargs: further variables for the template.

        Raises RequestError for messages that are malformed or that the template refuses, and
        ModelFileError for a template that does not compile or breaks its bounds.
        """
        variables = _variables(messages, add_generation_prompt, tools, kwargs)
        return self._render(variables)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        limit: int | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the prompt as token ids. Takes what `render` takes, and `limit` as `Tokenizer.encode` does.

        Special tokens that the template writes become those tokens; the same text inside messages or
        tools stays text, so a user cannot end a turn or begin another.
        """
        variables = _variables(messages, add_generation_prompt, tools, kwargs)
        breaker = self._breaker(variables)

        def guard(text: str) -> str:
            return tokenizer.break_special(text, breaker)

        guarded = _map_texts(variables, guard)
        for before, after in zip(variables["messages"], guarded["messages"], strict=True):
            after["role"] = before["role"]
        text = self._render(guarded)
        return tokenizer.encode(text, add_special=False, parse_special=True, breaker=breaker, limit=limit)

    def _render(self, variables: dict[str, Any]) -> str:
        renderer = self._tools_renderer if variables["tools"] else self._renderer
        return renderer.render(self._tokens | variables)

    def _breaker(self, variables: dict[str, Any]) -> str:
        """Choose a character that occurs nowhere in the template or in what it is given."""
        found = set(self._sources)

        def note(text: str) -> str:
            found.update(text)
            return text

        _map_texts(variables, note)
        return next(char for char in map(chr, _BREAKERS) if char not in found)


def _token_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and its like, as templates know them."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    texts = {}
    for name, key in _TOKEN_NAMES.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            texts[f"{name}_token"] = tokens[token]
    return texts


def _variables(
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages is not a list", "pass [{'role': 'user', 'content': '...'}]")
    if not messages:
        raise RequestError("messages is empty", "pass at least one message")
    checked = [_message(i, message) for i, message in enumerate(messages)]
    return {
        **extra,
        "messages": checked,
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }


def _message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {type(message).__name__}, not a dict", "give it 'role' and 'content'")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where} has the role {role!r}", suggest(str(role), list(_ROLES)))
    # A field without a value is a missing field: templates test for presence.
    kept = {str(key): value for key, value in message.items() if value is not None}
    if "content" in kept:
        kept["content"] = _content(where, kept["content"])
    elif not kept.get("tool_calls"):
        raise RequestError(f"{where} has no content", "give it a string")
    return kept


def _content(where: str, content: object) -> str:
    """Return the content as one string; text parts are joined by line breaks, as other servers do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise RequestError(f"{where}.content is {type(content).__name__}", "give a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}.content[{i}] is of type {kind!r}",
                "only {'type': 'text', 'text': '...'} can be read",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in nested lists and dicts; keys that are mere names stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            k if not isinstance(k, str) or k.isidentifier() else change(k): _map_texts(v, change)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return value
