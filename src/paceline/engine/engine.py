"""Many requests over one target, one pass at a time."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from paceline.core import Constraint, Context, Output, SamplingParams, Target
from paceline.engine.counters import Counters
from paceline.engine.request import Planner, Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import RowBuilder, Work, commit, shares
from paceline.errors import PromptTooLongError, RequestError
from paceline.models.kv import KVCache
from paceline.planning.pass_time import PassTime
from paceline.text.tokenizer import Tokenizer

_log = logging.getLogger("paceline")


class Engine:
    """Runs any number of requests over one target. Not thread-safe, but for `create`: one caller at a time.

    Args:
        target: the model; its pages are this engine's alone.
        tokenizer: of the model.
        context_limit: most tokens of prompt and output together; None means the target's.
        max_num_seqs: most requests that run at a time; None means one per row of a pass.
        max_num_batched_tokens: most rows of a pass; None means as many as the target takes.
        pass_time: the target's pass times, from which the length of prompt chunks follows; it learns from
            what is observed. None lets a chunk fill the pass.

    Attributes:
        counters: what was done so far.
        torn: a change of state has begun and not ended. Seen from outside: it was interrupted.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        *,
        context_limit: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        pass_time: PassTime | None = None,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        limits = [target.context_limit, target.pages * target.page_size]
        self.context_limit = min(limits if context_limit is None else [*limits, context_limit])
        self.cache = KVCache.of(target)
        self.counters = Counters()
        self.pass_time = pass_time
        max_rows = min(target.max_rows, max_num_batched_tokens or target.max_rows)
        self.scheduler = Scheduler(
            self.cache,
            self.counters,
            self._fail,
            max_rows=max_rows,
            max_num_seqs=max_num_seqs or max_rows,
            pass_time=pass_time,
        )
        self._rows = RowBuilder(max_rows, self.context_limit)
        self._unfinished: dict[Request, None] = {}
        self._ids = itertools.count()
        self._heard: frozenset[int] = frozenset()
        self.torn = False

    @property
    def idle(self) -> bool:
        return not self._unfinished

    @property
    def running(self) -> int:
        """Requests that hold pages now."""
        return len(self.scheduler.running)

    def add(self, prompt: Sequence[int], params: SamplingParams, planner: Planner, **options: Any) -> Request:
        """Create a request and queue it."""
        request = self.create(prompt, params, planner, **options)
        self.enqueue(request)
        return request

    def create(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        planner: Planner,
        *,
        seed: int,
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
        max_draft: int | None = None,
        leader: Request | None = None,
        index: int = 0,
    ) -> Request:
        """Make a request without queueing it; any thread may.

        Args:
            seed: key of the position noise.
            prediction: token ids that the output will resemble.
            constraint: at the start of its text; the request advances it.
            max_draft: most draft tokens in a pass; None leaves it to the planner.
            leader: request over the same prompt whose KV this one may share.
            index: which of the n completions this is.

        Raises:
            RequestError: the prompt is empty, too long, or names ids outside the vocabulary.
        """
        self._refuse_ids(prompt, "the prompt")
        self._refuse_ids(prediction, "the prediction")
        limit = self.context_limit
        if not prompt:
            raise RequestError("the prompt is empty", "give at least one token; this model has no BOS token")
        if len(prompt) >= limit:
            raise PromptTooLongError(len(prompt), limit)
        cap = limit - len(prompt)
        context = Context(
            next(self._ids), list(prompt), len(prompt), list(prediction), params, seed, constraint
        )
        request = Request(
            context,
            params,
            self.tokenizer,
            vocab_size=self.target.vocab_size,
            seed=seed,
            budget=cap if params.max_tokens is None else min(cap, params.max_tokens),
            planner=planner,
            leader=leader,
            index=index,
            max_draft=max_draft,
        )
        if request.budget == 0:
            request.finish_reason = "length"
            request.send()
        return request

    def enqueue(self, request: Request) -> None:
        """Queue a request that `create` made."""
        self._mend()
        if not request.over:
            self.torn = True
            self._unfinished[request] = None
            self.scheduler.waiting.append(request)
            self.torn = False

    def abort(self, request: Request) -> None:
        """End a request now and free what it holds; nothing happens if it is over, or was never queued."""
        self._mend()
        if not request.over and request in self._unfinished:
            self.torn = True
            request.finish_reason = "abort"
            request.send()
            self._retire(request)
            self.torn = False

    def fail(self, error: Exception) -> None:
        """End all requests because of an error that is nobody's in particular."""
        self.scheduler.clear()
        self.torn = False
        for request in self._unfinished:
            request.error = request.error or error
            _forget(request)
        self._unfinished.clear()

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
        works = self.scheduler.schedule()
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
        self._observe(works, seconds)
        self._hand_over(works, started)
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
        self._listen(works)
        started = time.perf_counter()
        output = self.target.forward(rows)
        return output, time.perf_counter() - started

    def _listen(self, works: Sequence[Work]) -> None:
        """Have the pass return the states that somebody in it reads, and no others."""
        layers: frozenset[int] = frozenset()
        for work in works:
            layers |= work.request.planner.layers
        if layers != self._heard:
            self.target.listen(sorted(layers))
            self._heard = layers

    def _observe(self, works: Sequence[Work], seconds: float) -> None:
        if self.pass_time is None:
            return
        rows = sum(work.rows for work in works)
        prompts = [work for work in works if not work.decode]
        if prompts:
            # After the commit the prompt is as long as its last row looks back.
            looks = sum(work.rows * (len(work.sequence) - work.rows // 2) for work in prompts)
            self.pass_time.observe_prompts(rows, looks, seconds)
        elif any(work.request.planner.speculates for work in works):
            self.pass_time.observe(rows, seconds)

    def _commit(self, works: Sequence[Work], output: Output) -> None:
        self.counters.passes += 1
        for work, share in zip(works, shares(works, output), strict=True):
            try:
                commit(work, share, self.target, self.cache, self.counters)
            except Exception as error:
                self._fail(work.request, error)

    def _hand_over(self, works: Sequence[Work], started: float) -> None:
        for work in works:
            request = work.request
            if work.wanted and not request.over:
                request.send()
                if request.over:
                    self._retire(request)
        # Last, so that sending counts; a completion that was sent just now shares its request's timings.
        seconds = time.perf_counter() - started
        for work in works:
            work.request.clock(seconds, decode=work.decode)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        self._retire(request)

    def _retire(self, request: Request) -> None:
        self.scheduler.remove(request)
        del self._unfinished[request]
        _forget(request)

    def _mend(self) -> None:
        """After a torn step trust nothing but the tokens: drop the cache, rebuild the rest from them."""
        if not self.torn:
            return
        self.scheduler.clear()
        for request in list(self._unfinished):
            _forget(request)
            if request.over:
                del self._unfinished[request]
            else:
                request.restart(next(self._ids))
                self.scheduler.waiting.append(request)
        self.torn = False


def _forget(request: Request) -> None:
    """Let drafters drop what they keep for a request; one that cannot must not take others with it."""
    try:
        request.planner.forget(request.context)
    except Exception:
        _log.exception("a drafter could not forget a request")
