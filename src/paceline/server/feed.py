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

Take = Callable[[list[Item]], bool]
"""Takes what arrived; returns whether that was all."""


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
    """

    def __init__(self, observe: Observer, *, whole: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._observe = observe
        self._whole = whole
        self._items: deque[Item] = deque()
        self._waking = False
        self._take: Take | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._tickets: list[Ticket] = []

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

    async def run(self, take: Take) -> None:
        """Hand everything that arrives to `take`, until it says that this was all.

        It is called by the loop itself: to resume a task through all that waits for it would cost several
        times what a token's event does.

        Raises:
            Exception: what `take` raised, or `fail` was given.
        """
        self._take = take
        self._wake()
        await self._over

    def fail(self, error: Exception) -> None:
        """End the feed from the loop's side."""
        if not self._over.done():
            self._over.set_exception(error)
            self.cancel()

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
        if self._take is None or self._over.done():
            return
        items: list[Item] = []
        while self._items:
            items.append(self._items.popleft())
        try:
            if items and self._take(items):
                self._over.set_result(None)
        except Exception as error:
            self.fail(error)
