"""Many requests, one pass at a time: who takes part in the next pass, and with how many rows."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

from paceline.core import Context, Draft, Output, SamplingParams, Target
from paceline.engine.request import Planner, Request
from paceline.engine.step import RowBuilder, Work, commit, shares
from paceline.errors import RequestError
from paceline.models.kv import KVCache, KVSequence
from paceline.text.tokenizer import Tokenizer


class Engine:
    """Runs any number of requests over one target. Not thread-safe: one caller at a time.

    Requests are served in order of arrival. Every running request takes part in every pass: one row and
    its draft while decoding, as many prompt rows as fit otherwise. When pages run out, the youngest is
    sent back to the queue and recomputed later; the oldest always gets on.

    Args:
        target: the model; its pages are this engine's alone.
        tokenizer: of the model.
        context_limit: most tokens of prompt and output together; None means the target's.

    Attributes:
        torn: a change of state has begun and not ended. Seen from outside: it was interrupted.
    """

    def __init__(self, target: Target, tokenizer: Tokenizer, *, context_limit: int | None = None) -> None:
        self.target = target
        self.tokenizer = tokenizer
        limits = [target.context_limit, target.pages * target.page_size]
        self.context_limit = min(limits if context_limit is None else [*limits, context_limit])
        self.cache = KVCache(target.pages, target.page_size, target.copy_page)
        self._rows = RowBuilder(target.max_rows, self.context_limit)
        self._unfinished: dict[Request, None] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._ids = itertools.count()
        self._full = False  # the head of the queue did not fit, and nothing was freed since
        self.torn = False

    @property
    def idle(self) -> bool:
        return not self._unfinished

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        planner: Planner,
        *,
        seed: int,
        prediction: Sequence[int] = (),
        leader: Request | None = None,
        index: int = 0,
    ) -> Request:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty, too long, or names ids outside the vocabulary.
        """
        self._mend()
        self._refuse_ids(prompt, "the prompt")
        self._refuse_ids(prediction, "the prediction")
        limit = self.context_limit
        if not prompt:
            raise RequestError("the prompt is empty", "give at least one token; this model has no BOS token")
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context limit is {limit}, output included",
                f"shorten the prompt to {limit - 1} tokens or raise max_model_len",
            )
        cap = limit - len(prompt)
        request = Request(
            Context(next(self._ids), list(prompt), len(prompt), list(prediction), params.temperature),
            params,
            self.tokenizer,
            vocab_size=self.target.vocab_size,
            seed=seed,
            budget=cap if params.max_tokens is None else min(cap, params.max_tokens),
            planner=planner,
            leader=leader,
            index=index,
        )
        if request.budget == 0:
            request.finish_reason = "length"
            request.send()
        else:
            self.torn = True
            self._unfinished[request] = None
            self._waiting.append(request)
            self.torn = False
        return request

    def abort(self, request: Request) -> None:
        """End a request now and free what it holds; nothing happens if it is over."""
        self._mend()
        if not request.over:
            self.torn = True
            request.finish_reason = "abort"
            request.send()
            self._retire(request)
            self.torn = False

    def clear_cache(self) -> None:
        """Forget cached prefixes; running requests are recomputed."""
        self.torn = True
        self._mend()

    def step(self) -> None:
        """Run one pass, and hand every request that took part what it brought.

        An error that belongs to one request ends that request alone. If anything else interrupts a step,
        Ctrl-C for example, the next call puts the engine back to the last whole step.
        """
        self._mend()
        started = time.perf_counter()
        self.torn = True
        works = self._schedule()
        self.torn = False
        if not works:
            return
        try:
            output, seconds = self._check(works)
        except Exception as error:
            for work in works:
                self._fail(work.request, error)
            return
        self.torn = True
        self._commit(works, output)
        if not any(work.chunk > 1 for work in works):
            context_tokens = sum(len(work.sequence) for work in works)
            works[0].request.planner.observe(sum(work.rows for work in works), context_tokens, seconds)
        self._hand_over(works, time.perf_counter() - started)
        self.torn = False

    def _refuse_ids(self, tokens: Sequence[int], where: str) -> None:
        size = self.target.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            odd = next(token for token in tokens if not 0 <= token < size)
            raise RequestError(
                f"{where} holds token id {odd}, outside 0 to {size - 1}", "use ids of this model's tokenizer"
            )

    def _check(self, works: Sequence[Work]) -> tuple[Output, float]:
        rows = self._rows.build(works)
        started = time.perf_counter()
        output = self.target.forward(rows)
        return output, time.perf_counter() - started

    def _commit(self, works: Sequence[Work], output: Output) -> None:
        for work, (argmax, logits) in zip(works, shares(works, output), strict=True):
            try:
                commit(work, argmax, logits, self.target, self.cache)
            except Exception as error:
                self._fail(work.request, error)

    def _hand_over(self, works: Sequence[Work], seconds: float) -> None:
        for work in works:
            request = work.request
            if request.over:
                continue
            request.clock(seconds, decode=work.decode)
            if work.wanted:
                request.send()
            if request.over:
                self._retire(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        self._retire(request)

    def _retire(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._release(request)
        request.planner.forget(request.context)
        del self._unfinished[request]

    def _release(self, request: Request) -> None:
        self._full = False
        if request.sequence is not None:
            self.cache.free(request.sequence)
            request.sequence = None

    def _mend(self) -> None:
        """After a torn step trust nothing but the tokens: drop the cache, rebuild the rest from them."""
        if not self.torn:
            return
        self._running.clear()
        self._waiting.clear()
        self.cache.clear()
        self._full = False
        for request in list(self._unfinished):
            request.planner.forget(request.context)
            if request.over:
                del self._unfinished[request]
            else:
                request.restart(next(self._ids))
                self._waiting.append(request)
        self.torn = False

    def _schedule(self) -> list[Work]:
        self._admit()
        for request in list(self._running):
            if request in self._running:
                self._secure(request)
        works = self._decodes([request for request in self._running if request.decoding])
        spare = self.target.max_rows - sum(work.rows for work in works)
        for request in self._running:
            if not request.decoding and spare > 0 and (work := self._prefill(request, spare)) is not None:
                works.append(work)
                spare -= work.rows
        return works

    def _admit(self) -> None:
        if self._full:
            return
        held_back: list[Request] = []
        while self._waiting and len(self._running) < self.target.max_rows:
            request = self._waiting.popleft()
            if not _may_start(request):
                held_back.append(request)
            elif not self._start(request):
                held_back.append(request)
                self._full = True
                break
        self._waiting.extendleft(reversed(held_back))

    def _start(self, request: Request) -> bool:
        sequence = self._open(request)
        uncovered = len(request.context.tokens) - len(sequence) - self.cache.slack(sequence)
        missing = -(-uncovered // self.cache.page_size)
        if self._running and missing > self.cache.available:
            self.cache.free(sequence)
            return False
        request.sequence = sequence
        if request.cached_tokens is None:
            request.cached_tokens = len(sequence)
        self._running.append(request)
        self._running.sort(key=lambda running: running.order)
        return True

    def _open(self, request: Request) -> KVSequence:
        leader, request.leader = request.leader, None
        tokens, there = request.context.tokens, None if leader is None else leader.sequence
        # A leader that was sent back and is being recomputed holds only part of the prompt.
        if there is not None and len(there) >= len(tokens) - 1 and not request.generated:
            return self.cache.fork(there, len(tokens) - 1)
        return self.cache.open(tokens)

    def _secure(self, request: Request) -> None:
        """Get one slot for the request, at the cost of younger ones; without any it goes back itself."""
        assert request.sequence is not None
        while not self.cache.reserve(request.sequence, 1):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        self._waiting.appendleft(request)

    def _decodes(self, requests: list[Request]) -> list[Work]:
        """One row and a draft for each; drafts share the rows and pages that nobody needs."""
        if not requests:
            return []
        rows = (self.target.max_rows - len(self._running)) // len(requests)
        slots = self.cache.available // len(requests) * self.cache.page_size
        rooms = []
        for request in requests:
            assert request.sequence is not None
            rooms.append(max(0, min(request.room, rows, slots + self.cache.slack(request.sequence) - 1)))
        works = []
        for request, draft in zip(requests, _plan(requests, rooms), strict=True):
            assert request.sequence is not None
            reserved = self.cache.reserve(request.sequence, 1 + len(draft))
            assert reserved, "rooms promised pages that are not there"
            works.append(Work(request, request.sequence, 1, draft, wanted=True, decode=True))
        return works

    def _prefill(self, request: Request, rows: int) -> Work | None:
        sequence = request.sequence
        assert sequence is not None
        slots = self.cache.slack(sequence) + self.cache.available * self.cache.page_size
        chunk = min(request.pending, rows, slots)
        if chunk <= 0:
            return None
        reserved = self.cache.reserve(sequence, chunk)
        assert reserved, "the chunk was cut to the pages there are"
        return Work(request, sequence, chunk, _EMPTY, wanted=chunk == request.pending, decode=False)


_EMPTY = Draft.empty()


def _may_start(request: Request) -> bool:
    """A request that shares its leader's prompt waits until that is computed."""
    leader = request.leader
    return leader is None or leader.generated > 0 or leader.over


def _plan(requests: Sequence[Request], rooms: Sequence[int]) -> list[Draft]:
    """Ask each planner once for all its requests."""
    groups: dict[Planner, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(request.planner, []).append(i)
    drafts: list[Draft] = [_EMPTY] * len(requests)
    for planner, members in groups.items():
        planned = planner.plan([requests[i].context for i in members], [rooms[i] for i in members])
        for i, draft in zip(members, planned, strict=True):
            assert len(draft) <= rooms[i], "a draft is larger than its room"
            drafts[i] = draft
    return drafts
