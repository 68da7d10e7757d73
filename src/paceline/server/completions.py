"""Answers of /v1/completions."""

from __future__ import annotations

from typing import Any

from paceline.core import Completion
from paceline.engine import Chunk
from paceline.server.logprobs import CompletionLogprobs
from paceline.server.reply import dumps
from paceline.text.tokenizer import Tokenizer

OBJECTS = ("text_completion", "text_completion")


class TextChoice:
    """One text.

    Args:
        echo: what stands in front of it.
        logprobs: whether they were asked for.
    """

    nothing = '""'

    def __init__(self, tokenizer: Tokenizer, *, echo: str, logprobs: bool) -> None:
        self._echo = echo
        self._unsent = echo
        self._logprobs = CompletionLogprobs(tokenizer, len(echo)) if logprobs else None

    def pieces(self, chunk: Chunk) -> list[tuple[str, str]]:
        text, self._unsent = self._unsent + chunk.text, ""
        if self._logprobs is not None and chunk.logprobs:
            return [(dumps(text), dumps(self._logprobs.take(chunk.logprobs)))]
        return [(dumps(text), "null")] if text else []

    def finish(self, completion: Completion) -> tuple[str, str]:
        return '""', completion.finish_reason

    def whole(self, completion: Completion) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.take(completion.logprobs or [])
        return {
            "text": self._echo + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
