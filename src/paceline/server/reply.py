"""What both kinds of answers share: identity, events, what stands at the end."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core import Completion
from paceline.engine import Chunk
from paceline.server import figures
from paceline.server.settings import VERSION
from paceline.text.stream import StreamDecoder
from paceline.text.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"
PING = b": ping\n\n"

dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How the answer is to look.

    Attributes:
        kind: prefix of the id, "chatcmpl" or "cmpl".
        prompts, n: there are prompts * n choices.
        predicted: the client gave a prediction.
        usage: a streamed answer ends with a chunk for usage.
        sources: tell which drafter guessed each token.
        stop: the request's stop strings.
    """

    kind: str
    model: str
    prompts: int
    n: int
    predicted: bool
    usage: bool
    sources: bool
    stop: Sequence[str]


class Choice(Protocol):
    """One choice of an answer while it is written.

    Attributes:
        nothing: JSON of a delta or text that adds nothing.
    """

    nothing: str

    def pieces(self, chunk: Chunk) -> list[tuple[str, str]]:
        """What the chunk adds to a stream: JSON of (delta or text, logprobs); the finish comes apart."""
        ...

    def finish(self, completion: Completion) -> tuple[str, str]:
        """JSON of the last (delta or text, finish reason)."""
        ...

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The finished choice."""
        ...


class Reply:
    """Writes one answer, whole or as events.

    Args:
        choices: one for each completion, all of the first prompt first.
        field: what a streamed choice carries its text in: "delta" or "text".
        objects: names of the whole answer and of a chunk of it.
    """

    def __init__(
        self,
        wishes: Wishes,
        tokenizer: Tokenizer,
        choices: Sequence[Choice],
        *,
        field: str,
        objects: tuple[str, str],
    ) -> None:
        self._wishes = wishes
        self._choices = choices
        self._objects = objects
        self._done: dict[int, Completion] = {}
        self._id = {"id": f"{wishes.kind}-{uuid.uuid4().hex}"}
        self._identity = {
            "created": int(time.time()),
            "model": wishes.model,
            "system_fingerprint": f"paceline-{VERSION}",
        }
        self._sources = [Sources(tokenizer, wishes.stop) if wishes.sources else None for _ in choices]
        self._head = f"data: {dumps(self._named(objects[1]))[:-1]},"
        usage = '"usage":null,' if wishes.usage else ""
        self._opened = [
            f'{self._head}{usage}"choices":[{{"index":{index},"{field}":' for index in range(len(choices))
        ]

    @property
    def complete(self) -> bool:
        return len(self._done) == len(self._choices)

    def events(self, prompt: int, chunk: Chunk) -> str:
        """What a stream tells about one chunk; after the last chunk of the last choice, the end of it."""
        index = prompt * self._wishes.n + chunk.index
        choice = self._choices[index]
        source = self._sources[index]
        told = "" if source is None else f',"paceline":{dumps(source.of(chunk))}'
        parts: list[str] = []
        pieces = choice.pieces(chunk)
        for left, (piece, logprobs) in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
            parts.append(self._event(index, piece, logprobs, "" if left else told))
        told = "" if pieces else told
        if chunk.completion is not None:
            self._done[index] = chunk.completion
            parts.append(self._closing(index, choice, chunk.completion, told))
        elif told:
            parts.append(self._event(index, choice.nothing, "null", told))
        return "".join(parts)

    def take(self, prompt: int, completion: Completion, index: int) -> None:
        """Keep a finished completion for `document`."""
        self._done[prompt * self._wishes.n + index] = completion

    def document(self) -> dict[str, Any]:
        """The whole answer; needs all completions."""
        done = self._completions()
        answer = self._named(self._objects[0])
        answer["choices"] = [
            {"index": index} | choice.whole(completion)
            for index, (choice, completion) in enumerate(zip(self._choices, done, strict=True))
        ]
        for choice, source, completion in zip(answer["choices"], self._sources, done, strict=True):
            if source is not None:
                choice["paceline"] = source.whole(completion)
        return answer | {"usage": self._usage(done)} | self._account(done)

    def rate(self) -> float:
        """Tokens per second while decoding."""
        return figures.decode_rate(self._completions())

    def _event(self, index: int, piece: str, logprobs: str, told: str) -> str:
        return f'{self._opened[index]}{piece},"logprobs":{logprobs},"finish_reason":null}}]{told}}}\n\n'

    def _closing(self, index: int, choice: Choice, completion: Completion, told: str) -> str:
        last, reason = choice.finish(completion)
        stop = dumps(completion.stop_reason)
        text = (
            f'{self._opened[index]}{last},"logprobs":null,"finish_reason":"{reason}","stop_reason":{stop}}}]'
        )
        if not self.complete:
            return f"{text}{told}}}\n\n"
        done = self._completions()
        account = self._account(done)
        if not self._wishes.usage:
            return f"{text}{told},{dumps(account)[1:]}\n\n{DONE}"
        tail = dumps({"choices": [], "usage": self._usage(done)} | account)[1:]
        return f"{text}{told}}}\n\n{self._head}{tail}\n\n{DONE}"

    def _named(self, kind: str) -> dict[str, Any]:
        return self._id | {"object": kind} | self._identity

    def _completions(self) -> list[Completion]:
        return [self._done[index] for index in sorted(self._done)]

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        return figures.usage(done, prompts=self._wishes.prompts, predicted=self._wishes.predicted)

    def _account(self, done: Sequence[Completion]) -> dict[str, Any]:
        return {
            "timings": figures.timings(done, prompts=self._wishes.prompts),
            "metrics": {"speculative_decoding": figures.speculative_decoding([c.speculation for c in done])},
            "seed": done[0].seed,
        }


@dataclass(slots=True)
class Sources:
    """Which drafter guessed each token of a choice, and the text that each token added.

    The pieces of a chunk join to its text. A piece is empty while a character or a possible stop string
    is incomplete.
    """

    tokenizer: Tokenizer
    stop: Sequence[str]
    _decoder: StreamDecoder = field(init=False)
    _passes: int = 0
    _drafted: int = 0

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer, self.stop)

    def of(self, chunk: Chunk) -> dict[str, Any]:
        """The object beside a chunk."""
        pieces = [self._decoder.push(token) for token in chunk.tokens]
        told: dict[str, Any] = {}
        if chunk.completion is not None:
            tail = self._decoder.finish()
            pieces[-1:] = [pieces[-1] + tail] if pieces else []
            told = {"speculation": figures.speculative_decoding([chunk.completion.speculation])}
        found = {
            "tokens": chunk.tokens,
            "sources": chunk.sources,
            "pieces": pieces,
            "passes": chunk.passes - self._passes,
            "drafted": chunk.drafted - self._drafted,
        } | told
        self._passes, self._drafted = chunk.passes, chunk.drafted
        return found

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The object in a finished choice."""
        stats = completion.speculation
        chunk = Chunk(
            completion.text,
            completion.tokens,
            completion.token_sources,
            None,
            passes=stats.passes,
            drafted=stats.drafted,
            completion=completion,
        )
        return self.of(chunk)
