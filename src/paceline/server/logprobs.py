"""Log-probabilities, in the two forms that the API has."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from paceline.core import TokenLogprob
from paceline.text.tokenizer import Tokenizer

_LEAST = -9999.0  # what stands for minus infinity, which JSON cannot say


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The chat form: for each token its text, its bytes and its alternatives."""
    return {
        "content": [
            _entry(tokenizer, one.token, one.logprob)
            | {"top_logprobs": [_entry(tokenizer, token, value) for token, value in one.top]}
            for one in found
        ],
        "refusal": None,
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(data)}


class CompletionLogprobs:
    """The completions form: parallel lists. A token that is no whole character is named by its bytes.

    Args:
        offset: characters of text before the first token: the prompt's, when it is echoed.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def take(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next tokens."""
        offsets = [self._advance(one.token) for one in found]
        tops = [[*one.top, (one.token, one.logprob)] for one in found]
        return {
            "tokens": [self._name(one.token) for one in found],
            "token_logprobs": [max(one.logprob, _LEAST) for one in found],
            "top_logprobs": [
                {self._name(token): max(value, _LEAST) for token, value in top} if one.top else None
                for one, top in zip(found, tops, strict=True)
            ],
            "text_offset": offsets,
        }

    def _advance(self, token: int) -> int:
        before = self._offset
        if not self._tokenizer.is_special(token):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return before

    def _name(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
