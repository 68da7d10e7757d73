"""What drafters with a network of their own have in common: they draft for the requests where it pays.

Each request has a seat: its place in the network's cache, and how its guesses fared. A step asks for all
requests together. What is hoped for is what guesses were given for chances lately; where that makes the step
faster, the request gets room in the cache, and a draft that grows while its passes pay; see `outlook`. What
was written afterwards says which guesses were right, and the chances follow; see `calibration`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from paceline.core import Context, Draft, Outcome, Prices
from paceline.drafters.calibration import Confidence, Luck
from paceline.drafters.memory import Remembering
from paceline.drafters.offer import Offer
from paceline.drafters.outlook import Hope, Outlook
from paceline.drafters.tenants import Tenant, Tenants
from paceline.errors import PacelineError
from paceline.sampling.sampler import Sampler

_log = logging.getLogger("paceline")

FIRST_HOPE = 0.6
"""Chance of a drafted token before anything is known."""

_FIRST_LENGTH = 128.0
"""Tokens of a response before any was seen."""

_CURIOSITY = 0.9
"""What is hoped for before a drafter has made FEW guesses: if it can pay at all it is tried, to be judged."""


class Costs(Protocol):
    """Seconds of a pass by row count; `planning.PassTime` is one."""

    def cost(self, rows: int) -> float: ...

    def observe(self, rows: int, seconds: float) -> None: ...

    def relax(self) -> None: ...


T = TypeVar("T", bound=Tenant)


@dataclass(slots=True)
class Seat(Generic[T]):
    """What is remembered of one request.

    Attributes:
        sampler: stands behind the tokens that were followed.
        track: its place in the cache.
        hope: average chance of its first guesses lately.
        hoped: how many of them there were.
        length: tokens of the text that were followed.
    """

    sampler: Sampler
    track: T
    hope: float
    luck: Luck
    hoped: int = 0
    offer: Offer = field(default_factory=Offer)
    length: int = 0


S = TypeVar("S", bound=Seat[Any])


@dataclass(slots=True)
class Growth(Generic[S]):
    """A draft under way.

    Attributes:
        ids: the text as the network reads it.
        left: how many nodes it may still get.
    """

    seat: S
    context: Context
    ids: Sequence[int]
    left: int


G = TypeVar("G", bound=Growth[Any])


class NetworkDrafter(Remembering, Generic[S, G]):
    """Base of drafters that run a network; implements most of `core.CostlyDrafter`.

    Args:
        name: of the drafter.
        title: what to call it when it fails.
        cache: of the network.
        costs: pass times of the network.
        clock: seconds.

    Attributes:
        costs: pass times of the network, corrected while it runs.
        broken: what ended drafting for good, None while it works.
    """

    KINDS: int
    """Ways to arrive at a guess, for its chance."""

    HOPE_RATE: float
    HOPE_RATE_OF_ALL = 0.02
    WORTH: int
    """Hopes are running means, of one request and of all: what they begin with counts as so many guesses, and
    none that comes later counts for less than the rate."""

    FEW = 0

    calibration: Confidence

    def __init__(
        self,
        name: str,
        title: str,
        cache: Tenants[Any],
        costs: Costs,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.cache = cache
        self.costs = costs
        self.broken: str | None = None
        self._title = title
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget all text and all that was learnt; also after an interruption."""
        self.calibration = Confidence(self.KINDS)
        self._hope, self._hoped = FIRST_HOPE, 0
        self._mean_length = _FIRST_LENGTH
        self._seats: dict[int, S] = {}
        self.cache.clear()

    def propose(self, context: Context, budget: int) -> Draft:
        return self.propose_many([context], [budget], None)[0]

    def propose_many(
        self, contexts: Sequence[Context], budgets: Sequence[int], prices: Prices | None
    ) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        if self.broken is not None:
            return drafts
        outlook = None if prices is None else self._outlook(prices)
        growths = [self._begin(c, b) for c, b in zip(contexts, budgets, strict=True)]
        asked = [(i, growth) for i, growth in enumerate(growths) if growth is not None]
        if outlook is not None:
            hopes = [self._expect(growth) for _, growth in asked]
            asked = [asked[n] for n in outlook.open(hopes)]
        if not asked:
            self.costs.relax()
            return drafts
        going = self._seated([growth for _, growth in asked])
        try:
            self._grow(going, outlook)
        except PacelineError as error:
            self._break(error)
            return drafts
        for i, growth in asked:
            drafts[i] = self._finish(growth)
        return drafts

    def commit(self, context: Context, outcome: Outcome | None) -> None:  # noqa: ARG002
        seat = self._seats.get(context.request)
        if seat is not None and seat.offer.guesses:
            self._follow(seat, context)

    def forget(self, context: Context) -> None:
        seat = self._seats.pop(context.request, None)
        if seat is not None:
            self._follow(seat, context)
            self.cache.release(seat.track)
        length = len(context.tokens) - context.prompt_length
        self._mean_length += 0.1 * (length - self._mean_length)

    def _resume_hope(self, hope: float, hoped: int) -> None:
        self._hope, self._hoped = hope, hoped

    def _hope_so_far(self) -> tuple[float, int]:
        return self._hope, self._hoped

    # --- what is particular to a drafter ---

    def _begin(self, context: Context, budget: int) -> G | None:
        """A draft of at most so many nodes, nothing of which is made; None where none can be."""
        raise NotImplementedError

    def _room(self, growth: G) -> int:
        """Slots that a draft takes behind the text; first cuts it to what the network can follow."""
        raise NotImplementedError

    def _grow(self, going: list[G], outlook: Outlook | None) -> None:
        """Fill the offers of these growths, as far as it pays, or to the end without an outlook."""
        raise NotImplementedError

    def _outlook(self, prices: Prices) -> Outlook:
        return Outlook(prices, self.costs.cost)

    def _read(self, seat: S, written: Sequence[int], start: int) -> None:
        """Take in what was written; from `start` on it is no longer the prompt."""
        for token in written[start:]:
            seat.sampler.advance(token)

    def _finish(self, growth: G) -> Draft:
        draft: Draft = growth.seat.offer.draft(self.name)
        return draft

    # --- for the drafters themselves ---

    def _spend(self, rows: int, seconds: float, outlook: Outlook | None) -> None:
        self.costs.observe(rows, seconds)
        if outlook is not None:
            outlook.spent += seconds

    def _follow(self, seat: S, context: Context) -> None:
        """Learn what became of the last guesses, and take in what was written."""
        written = context.tokens[seat.length :]
        if not written:
            return
        if seat.length:
            seat.offer.learn(written, self.calibration, seat.luck)
        seat.offer = Offer()
        self._read(seat, written, max(0, context.prompt_length - seat.length))
        seat.length = len(context.tokens)

    def _expect(self, growth: Growth[S]) -> Hope:
        seat, context = growth.seat, growth.context
        written = len(context.tokens) - context.prompt_length
        most = context.params.max_tokens
        left = self._mean_length if most is None else min(self._mean_length, most - written)
        rows = self.cache.missing(seat.track, growth.ids)
        hope = seat.hope if self._hoped >= self.FEW else max(_CURIOSITY, seat.hope)
        return Hope(hope, growth.left, rows, left * (1.0 - hope))

    def _seated(self, growths: Sequence[G]) -> list[G]:
        """Those that find room in the cache."""
        seated: list[G] = []
        for growth in growths:
            more = self._room(growth)
            busy = [other.seat.track for other in seated]
            if more > 0 and self.cache.open(growth.seat.track, growth.ids, more, busy):
                seated.append(growth)
        return seated

    def _learn_hope(self, seat: S, chance: float) -> None:
        """A first guess was given this chance."""
        seat.hoped += 1
        seat.hope += max(self.HOPE_RATE, 1.0 / (self.WORTH + seat.hoped)) * (chance - seat.hope)
        self._hoped += 1
        self._hope += max(self.HOPE_RATE_OF_ALL, 1.0 / (self.WORTH + self._hoped)) * (chance - self._hope)

    def _break(self, error: PacelineError) -> None:
        self.broken = error.message
        _log.warning("the %s is of no use and stays off: %s", self._title, error.message)
        self.reset()
