"""From the engine's thread to the event loop: what one HTTP request gets, in order.

The engine's side costs an append and, when the loop sleeps, one wake-up; what arrives while the loop is
busy is taken in one go.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.core import Constraint, SamplingParams
from paceline.engine import Chunk
from paceline.engine.llm import Speculate
from paceline.engine.service import Service, Ticket

Item = tuple[int, Chunk | Exception]
"""Which of the request's prompts, and what came of it."""

Observer = Callable[[int, Chunk | Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a request, ready to be submitted; arguments as for `Service.submit`."""

    prompt: Sequence[int]
    params: SamplingParams
    speculate: Speculate | None = None
    prediction: Sequence[int] | None = None
    constraint: Constraint | None = None
    max_draft: int | None = None


class ClientGoneError(Exception):
    """The client went away; nobody waits for an answer."""


class Feed:
    """What the jobs of one request bring.

    Args:
        observe: told everything on the engine's thread, for the metrics.
        whole: wake the loop for finished completions only.

    Attributes:
        failure: set from the loop's side, and raised by `next`.
    """

    def __init__(self, observe: Observer, *, whole: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._observe = observe
        self._whole = whole
        self._items: deque[Item] = deque()
        self._waking = False
        self._nudged = False
        self._waiter: asyncio.Future[None] | None = None
        self._tickets: list[Ticket] = []
        self.failure: Exception | None = None

    def submit(self, service: Service, jobs: Sequence[Job]) -> None:
        """Submit all jobs or none. Takes a while; not for the event loop's thread.

        Raises what `Service.submit` raises, and RequestError if all together can never be taken.
        """
        service.admit(sum(job.params.n for job in jobs))
        try:
            for index, job in enumerate(jobs):
                arguments: dict[str, Any] = {name: getattr(job, name) for name in job.__slots__}
                self._tickets.append(service.submit(**arguments, deliver=partial(self._deliver, index)))
        except BaseException:
            self.cancel()
            raise

    async def next(self) -> list[Item]:
        """Everything that arrived since the last call; waits for something, or for `nudge`.

        Raises:
            Exception: the `failure`.
        """
        while not (self._items or self._nudged or self.failure):
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.failure is not None:
            raise self.failure
        self._nudged = False
        items: list[Item] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def fail(self, error: Exception) -> None:
        """End the feed from the loop's side."""
        if self.failure is None:
            self.failure = error
            self.cancel()
            self._wake()

    def nudge(self) -> None:
        """Let `next` return, with nothing if nothing is there. From the loop's thread."""
        self._nudged = True
        self._wake()

    def cancel(self) -> None:
        """Cancel what is not over; harmless when all is."""
        for ticket in self._tickets:
            ticket.cancel()

    def _deliver(self, index: int, item: Chunk | Exception) -> None:
        self._observe(index, item)
        if self._whole and isinstance(item, Chunk) and item.completion is None:
            return
        self._items.append((index, item))
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop was closed: the server has ended, and nobody listens
                self.cancel()

    def _wake(self) -> None:
        self._waking = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
