"""Answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from paceline.core import Completion
from paceline.engine import Chunk
from paceline.server.logprobs import chat_logprobs
from paceline.server.reply import dumps
from paceline.text.tokenizer import Tokenizer

OBJECTS = ("chat.completion", "chat.completion.chunk")


class Message:
    """One assistant message.

    Args:
        logprobs: whether they were asked for.
    """

    nothing = '{"content":""}'

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._begun = False

    def pieces(self, chunk: Chunk) -> list[tuple[str, str]]:
        parts: list[tuple[str, str]] = []
        if not self._begun:
            self._begun = True
            parts.append(('{"role":"assistant","content":"","refusal":null}', "null"))
        logprobs = "null"
        if self._logprobs and chunk.logprobs:
            logprobs = dumps(chat_logprobs(self._tokenizer, chunk.logprobs))
        if chunk.text or logprobs != "null":
            parts.append((f'{{"content":{dumps(chunk.text)}}}', logprobs))
        return parts

    def finish(self, completion: Completion) -> tuple[str, str]:
        return "{}", completion.finish_reason

    def whole(self, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        logprobs = None
        if self._logprobs:
            logprobs = chat_logprobs(self._tokenizer, completion.logprobs or [])
        return {
            "message": message,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
