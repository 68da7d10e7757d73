"""One request: what it asked, what it has written, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from paceline.core import (
    Completion,
    Context,
    Draft,
    FinishReason,
    Floats,
    Outcome,
    SamplingParams,
    SpeculationStats,
    Timings,
    TokenLogprob,
)
from paceline.models.kv import KVSequence
from paceline.sampling.sampler import Sampler
from paceline.text.stream import StreamDecoder
from paceline.text.tokenizer import Tokenizer


class Planner(Protocol):
    """What the engine asks of `planning.Planner`."""

    @property
    def speculates(self) -> bool: ...

    @property
    def layers(self) -> frozenset[int]: ...

    def plan(
        self, contexts: Sequence[Context], rooms: Sequence[int], *, decoding: int, base_rows: int
    ) -> list[Draft]: ...

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None: ...

    def commit(self, context: Context, outcome: Outcome | None) -> None: ...

    def forget(self, context: Context) -> None: ...

    def off_reason(self, context: Context) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added to a streamed text.

    Attributes:
        text: newly safe text; may be empty while a character or a possible stop string is incomplete.
        tokens: ids committed by the step.
        sources: for each token the drafter that guessed it, "" where the target wrote it itself.
        logprobs: one per token, None unless asked for.
        index: which of the n completions this belongs to.
        completion: the whole result, in the last chunk only.
        passes, drafted: decode passes and draft tokens checked for this text, up to and with this chunk.
    """

    text: str
    tokens: list[int]
    sources: list[str]
    logprobs: list[TokenLogprob] | None
    index: int = 0
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    passes: int = 0
    drafted: int = 0


class _Sent(NamedTuple):
    """A chunk, and how many tokens and pieces of text were sent with it and before."""

    chunk: Chunk
    tokens: int
    pieces: int


class Request:
    """The state of one completion.

    Args:
        context: prompt tokens, and the output as it grows.
        params: as asked; `n` is not looked at, every completion is a request of its own.
        vocab_size: length of a row of the target's logits.
        seed: key of the position noise.
        budget: most tokens to write; the context limit is already in it.
        planner: decides what to draft for it.
        leader: request over the same prompt whose KV this one may share.
        max_draft: most draft tokens in a pass; None leaves it to the planner.

    Attributes:
        order: place in the queue; lower was first.
        whole: computes its whole prompt, whatever the cache holds: somebody wants to hear of every token.
        error: what ended the request, if something went wrong.
    """

    def __init__(
        self,
        context: Context,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        seed: int,
        budget: int,
        planner: Planner,
        leader: Request | None = None,
        index: int = 0,
        max_draft: int | None = None,
    ) -> None:
        self.context = context
        self.params = params
        self.seed = seed
        self.budget = budget
        self.max_draft = budget if max_draft is None else max_draft
        self.planner = planner
        self.leader = leader
        self.index = index
        self.order = context.request
        self.whole = False
        self.sequence: KVSequence | None = None
        self.cached_tokens: int | None = None
        self.error: Exception | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.sources: list[str] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.stats = SpeculationStats()
        self.timings = Timings()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._arrival = time.perf_counter()
        self._sent: list[_Sent] = []
        self._fetched = 0
        eog = frozenset() if params.ignore_eos else tokenizer.eog_ids
        self._stop_ids = eog | frozenset(params.stop_token_ids)
        self._begin()

    def _begin(self) -> None:
        prompt = self.context.tokens[: self.context.prompt_length]
        self.sampler = Sampler(
            self.params, prompt, self._stop_ids, self._vocab_size, self.seed, self.context.constraint
        )
        self._decoder = StreamDecoder(self._tokenizer, self.params.stop)
        self._pieces: list[str] = []  # one per token, until the last

    @property
    def chunks(self) -> list[Chunk]:
        return [sent.chunk for sent in self._sent]

    @property
    def completion(self) -> Completion | None:
        """The result, once it is complete."""
        return self._sent[-1].chunk.completion if self._sent else None

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.completion is not None or self.error is not None

    @property
    def generated(self) -> int:
        return len(self.context.tokens) - self.context.prompt_length

    @property
    def pending(self) -> int:
        """Tokens whose KV is not in place yet: 1 while decoding."""
        return len(self.context.tokens) - (len(self.sequence) if self.sequence is not None else 0)

    @property
    def decoding(self) -> bool:
        """Whether the next pass is a decode pass; the one that yields the first token is prefill."""
        return self.generated > 0 and self.pending == 1

    @property
    def room(self) -> int:
        """Most draft tokens worth checking: the pass itself adds one token."""
        return min(self.budget - self.generated - 1, self.max_draft)

    def take(self, token: int, source: str, logprob: TokenLogprob | None) -> bool:
        """Append one committed token. True if it ends the text: the earliest event wins."""
        self.sources.append(source)
        if logprob is not None and self.logprobs is not None:
            self.logprobs.append(logprob)
        self.context.tokens.append(token)
        if token in self._stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.params.stop_token_ids else None
            return True
        self._pieces.append(self._decoder.push(token))
        if self._decoder.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._decoder.stopped
        elif self.generated >= self.budget:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def begin(self, cached_tokens: int) -> None:
        """Leave the queue for the first time."""
        self.cached_tokens = cached_tokens
        self.timings.queue_s = time.perf_counter() - self._arrival

    def clock(self, seconds: float, *, decode: bool) -> None:
        """Add the time of a step that this request took part in."""
        if decode:
            self.timings.decode_s += seconds
            return
        self.timings.prefill_s += seconds
        if self.generated and not self.timings.time_to_first_token_s:
            self.timings.time_to_first_token_s = time.perf_counter() - self._arrival

    def send(self) -> None:
        """Add what is new since the last call as a chunk; at the end, the completion with it."""
        completion = None
        if self.finish_reason is not None:
            self._pieces.append(self._decoder.finish())
            completion = self._complete()
        tokens, pieces = self._upto()
        chunk = Chunk(
            "".join(self._pieces[pieces:]),
            self.context.tokens[self.context.prompt_length + tokens :],
            self.sources[tokens:],
            None if self.logprobs is None else self.logprobs[tokens:],
            self.index,
            self.finish_reason,
            completion,
            self.stats.passes,
            self.stats.drafted,
        )
        # One append, so that an interrupt finds it done or not done.
        self._sent.append(_Sent(chunk, self.generated, len(self._pieces)))

    def fetch(self) -> Chunk | None:
        """The next chunk that was not fetched yet."""
        if self._fetched == len(self._sent):
            return None
        self._fetched += 1
        return self._sent[self._fetched - 1].chunk

    def restart(self, request: int) -> None:
        """Go back to what was sent, and rebuild everything derived from it.

        Args:
            request: a new identity, so that nothing half remembered under the old one is used.
        """
        old, (count, _) = self.context, self._upto()
        tokens = old.tokens[: old.prompt_length + count]
        constraint = None if old.constraint is None else old.constraint.fresh()
        self.context = replace(old, request=request, tokens=tokens, constraint=constraint)
        self.sequence = None
        self.finish_reason = self.stop_reason = None
        del self.sources[count:]
        if self.logprobs is not None:
            del self.logprobs[count:]
        self._begin()
        for token in tokens[old.prompt_length :]:
            self.sampler.advance(token)
            self._pieces.append(self._decoder.push(token))

    def _upto(self) -> tuple[int, int]:
        """Tokens and pieces of text sent so far."""
        return self._sent[-1][1:] if self._sent else (0, 0)

    def _complete(self) -> Completion:
        assert self.finish_reason is not None
        if self.stats.drafted == 0:
            self.stats.off_reason = self.planner.off_reason(self.context)
        return Completion(
            text="".join(self._pieces),
            tokens=self.context.tokens[self.context.prompt_length :],
            finish_reason=self.finish_reason,
            prompt_tokens=self.context.prompt_length,
            cached_tokens=self.cached_tokens or 0,
            timings=self.timings,
            speculation=self.stats,
            seed=self.seed,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
            token_sources=self.sources,
        )
