"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core import Completion
from paceline.engine import Chunk
from paceline.server.logprobs import chat_logprobs
from paceline.server.reply import dumps
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls import Parsed, ToolCallDelta, ToolCallParser

OBJECTS = ("chat.completion", "chat.completion.chunk")
_ROLE = ('{"role":"assistant","content":"","refusal":null}', "null")


class Message:
    """One assistant message.

    Args:
        logprobs: whether they were asked for.
        parser: makes what finds calls of tools in the text; None where there are no tools.
        parallel: whether there may be more than one call.
        forced: the caller named the function, which is then no reason to finish.
    """

    nothing = '{"content":""}'

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        parser: Callable[[], ToolCallParser] | None = None,
        parallel: bool = True,
        forced: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._new_parser = parser
        self._parser = parser() if parser else None
        self._parallel = parallel
        self._forced = forced
        self._begun = False
        self._called = False

    def pieces(self, chunk: Chunk) -> list[tuple[str, str]]:
        deltas = [dumps(delta) for delta in self._deltas(chunk)]
        logprobs = "null"
        if self._logprobs and chunk.logprobs:
            logprobs = dumps(chat_logprobs(self._tokenizer, chunk.logprobs))
            deltas = deltas or [self.nothing]
        parts = [] if self._begun else [_ROLE]
        self._begun = True
        return parts + [(delta, "null" if i else logprobs) for i, delta in enumerate(deltas)]

    def finish(self, completion: Completion) -> tuple[str, str]:
        return "{}", self._reason(completion)

    def whole(self, completion: Completion) -> dict[str, Any]:
        content, calls = completion.text, []
        if self._new_parser is not None:
            parsed = _parsed(self._new_parser(), completion.text, last=True)
            content, calls = parsed.content, self._allowed(parsed.calls)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            self._called = True
            message |= {"content": content or None, "tool_calls": _merged(calls)}
        logprobs = None
        if self._logprobs:
            logprobs = chat_logprobs(self._tokenizer, completion.logprobs or [])
        return {
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(completion),
            "stop_reason": completion.stop_reason,
        }

    def _deltas(self, chunk: Chunk) -> list[Mapping[str, Any]]:
        if self._parser is None:
            return [{"content": chunk.text}] if chunk.text else []
        parsed = _parsed(self._parser, chunk.text, last=chunk.completion is not None)
        calls = self._allowed(parsed.calls)
        self._called = self._called or bool(calls)
        texts: list[Mapping[str, Any]] = [{"content": parsed.content}] if parsed.content else []
        return texts + [{"tool_calls": [_call(call)]} for call in calls]

    def _allowed(self, calls: list[ToolCallDelta]) -> list[ToolCallDelta]:
        return calls if self._parallel else [call for call in calls if call.index == 0]

    def _reason(self, completion: Completion) -> str:
        called = self._called and not self._forced and completion.finish_reason == "stop"
        return "tool_calls" if called else completion.finish_reason


def _parsed(parser: ToolCallParser, text: str, *, last: bool) -> Parsed:
    found = parser.push(text)
    if not last:
        return found
    rest = parser.finish()
    return Parsed(found.content + rest.content, found.calls + rest.calls)


def _call(piece: ToolCallDelta) -> dict[str, Any]:
    """A piece of a call as OpenAI streams it."""
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _merged(pieces: list[ToolCallDelta]) -> list[dict[str, Any]]:
    """Whole calls from their pieces."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    return calls
