"""One thread that runs an LLM's engine for many callers: submit from anywhere, chunks come by callback."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from paceline.core import Constraint, DrafterStats, SamplingParams, is_whole
from paceline.engine.llm import LLM, Prompt, Speculate
from paceline.engine.request import Chunk, Request
from paceline.errors import QueueFullError, RequestError, ShuttingDownError, UsageError

_log = logging.getLogger("paceline")

_BOW = 0.0005

Deliver = Callable[[Chunk | Exception], None]
"""Takes what a step brought, on the engine's thread: it must be quick and must not block."""


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """What the engine holds now, and what it did since it was loaded.

    Attributes:
        running: requests with KV of their own.
        waiting: requests that have not started, or were sent back.
        kv_used: share of the cache's pages that running requests hold.
        prefix_queries: prompt tokens looked up in the cache.
        prefix_hits: those that were there.
        prompt_tokens: of all requests that started.
        generated_tokens: committed by all requests.
        passes: of the target, prefill included.
        preemptions: times that a request was sent back to the queue.
        drafts, drafted, accepted, accepted_per_position, by_drafter: as in `core.SpeculationStats`.
    """

    running: int
    waiting: int
    kv_used: float
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generated_tokens: int
    passes: int
    preemptions: int
    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    by_drafter: Mapping[str, DrafterStats]


class Ticket:
    """A submitted request with its n completions.

    Attributes:
        prompt_tokens: length of the prompt.
        seed: of the first completion; completion i has seed + i.
    """

    def __init__(self, llm: LLM, requests: Sequence[Request]) -> None:
        self._llm = llm
        self._requests = requests
        self.prompt_tokens = requests[0].context.prompt_length
        self.seed = requests[0].seed

    def cancel(self) -> None:
        """End what is left of it, wherever it is: at once, or when the pass that is running ends.

        Each completion cut short delivers a last chunk whose finish reason is "abort". From any thread,
        any number of times.
        """
        self._llm.cancel([request for request in self._requests if not request.over])


class Service:
    """Runs an LLM's engine on a thread of its own. Every method may be called from any thread.

    The LLM can still be used directly; requests of both kinds then share passes.

    Args:
        llm: stays the caller's to close, after the service.
        max_queue: most requests that wait, besides the `max_num_seqs` that may run; each of the n
            completions counts.
        max_num_seqs: overrides the LLM's own.

    Raises:
        UsageError: a limit that cannot be met.
    """

    def __init__(self, llm: LLM, *, max_queue: int = 256, max_num_seqs: int | None = None) -> None:
        if not is_whole(max_queue) or max_queue < 0:
            raise UsageError(f"max_queue is {max_queue!r}", "give a whole number from 0")
        if max_num_seqs is not None:
            llm.limit(max_num_seqs)
        llm.engine.scheduler.expecting = True
        self._llm = llm
        self._max_queue = int(max_queue)
        self._changed = threading.Condition()  # guards the four below
        self._live: dict[Request, Deliver] = {}
        self._refusing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        deliver: Deliver,
        speculate: Speculate | None = None,
        prediction: str | Sequence[int] | None = None,
        constraint: Constraint | None = None,
        max_draft: int | None = None,
    ) -> Ticket:
        """Queue a prompt and return at once; arguments as for `LLM.stream`.

        Args:
            deliver: gets the chunks of all n completions, `Chunk.index` says whose; the last of each has
                `completion`. An exception instead of a chunk ends one completion, and the others go on.
                If it raises, the request is cancelled.
            constraint: at the start of its text; it belongs to the request from now on.

        Raises:
            RequestError: it cannot be served; PromptTooLongError and QueueFullError say by how much.
            ShuttingDownError: after `drain` or `close`.
        """
        with self._changed:
            self._check(params.n)
        requests = self._llm.requests(
            prompt,
            params,
            speculate=speculate,
            prediction=prediction,
            constraint=constraint,
            max_draft=max_draft,
        )
        with self._changed:
            self._check(params.n)
            self._live.update(dict.fromkeys(requests, deliver))
            self._llm.enqueue(requests)
            self._changed.notify_all()
        return Ticket(self._llm, requests)

    def admit(self, count: int) -> None:
        """Raise what `submit` would if so many texts were asked for now, in however many prompts."""
        with self._changed:
            self._check(count)

    @property
    def capacity(self) -> int:
        """Most texts that may run and wait at a time."""
        return self._max_queue + self._llm.engine.scheduler.max_num_seqs

    def snapshot(self) -> ServiceStats:
        """The numbers of this moment; waits for nothing."""
        engine, cache = self._llm.engine, self._llm.engine.cache
        counters, speculation = engine.counters, engine.counters.speculation
        running = engine.running
        return ServiceStats(
            running=running,
            waiting=max(0, len(self._live) - running),
            kv_used=cache.used,
            prefix_queries=counters.prompt_tokens,
            prefix_hits=counters.cached_tokens,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            passes=counters.passes,
            preemptions=counters.preemptions,
            drafts=speculation.drafts,
            drafted=speculation.drafted,
            accepted=speculation.accepted,
            accepted_per_position=tuple(speculation.accepted_per_position),
            by_drafter={name: replace(stats) for name, stats in list(speculation.by_drafter.items())},
        )

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the others; False if some are left after `timeout` seconds."""
        with self._changed:
            self._refusing = True
            return self._changed.wait_for(lambda: not self._live, timeout)

    def close(self) -> None:
        """Refuse new requests, cancel the others, and end the thread."""
        with self._changed:
            self._refusing = self._closed = True
            self._llm.cancel([request for request in self._live if not request.over])
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._llm.engine.scheduler.expecting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, count: int) -> None:
        if self._refusing:
            raise ShuttingDownError
        if count > self.capacity:
            raise RequestError(
                f"{count} texts are asked for at once; the limit is {self.capacity}",
                "ask for fewer at a time",
            )
        if len(self._live) + count > self.capacity:
            raise QueueFullError(max(0, len(self._live) - self._llm.engine.running), self._max_queue)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._live or self._closed)
                if not self._live:
                    return
            try:
                self._llm.step()
            except Exception as error:
                _log.exception("a step failed; the requests in it end")
                self._llm.fail(error)
            for request, deliver in list(self._live.items()):
                self._hand_out(request, deliver)
            if self._llm.awaited:
                time.sleep(_BOW)  # locks are not fair; a thread that waits gets its turn now

    def _hand_out(self, request: Request, deliver: Deliver) -> None:
        over = request.over  # asked first: what comes later is for the next turn
        try:
            while (chunk := request.fetch()) is not None:
                deliver(chunk)
            if over and request.completion is None and request.error is not None:
                deliver(request.error)
        except Exception:
            _log.exception("a chunk could not be delivered; its request is cancelled")
            self._llm.cancel([request])
            over = True
        if over:
            with self._changed:
                del self._live[request]
                self._changed.notify_all()
