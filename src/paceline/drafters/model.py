"""A small language model guesses for the large one, in its own words if it must.

It follows the request's text in a KV cache of its own, and drafts the likeliest chain with, where it was
unsure, its second choice beside it. Where the request samples, it samples too, with the request's own
noise: two models that see the same noise and nearly the same probabilities mostly draw the same token.

How sure the draft model says it is tells how likely the target agrees, but not exactly: the probability
is one feature of a chance that is learnt while running.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log, prod
from typing import Protocol

from paceline.core import ROOT, Context, Draft, Floats, Outcome, Prices, Target
from paceline.drafters.calibration import Calibration, Features, Luck, QuickLuck
from paceline.drafters.choice import Choices, request_sampler
from paceline.drafters.draft_cache import DraftCache, Track
from paceline.drafters.memory import Remembering
from paceline.drafters.offer import Offer
from paceline.drafters.outlook import Hope, Outlook
from paceline.errors import PacelineError, RequestError
from paceline.sampling.sampler import Sampler
from paceline.text.respelling import (
    LOOK_BEHIND,
    Spelling,
    TextSpelling,
    TokenSpelling,
    Translator,
    retell,
)

_log = logging.getLogger("paceline")

# Layout of the features: how the guess was made and how probable the draft model holds it, then the depth.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
_CENTRES = (0.01, 0.03, 0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.975, 0.995)
_FIRST, _SECOND = 0, 4  # first choices: likeliest or drawn, then the same where the text is retold
_KINDS = 5
_DEPTH = _KINDS * len(_CENTRES)
_DEPTH_CLASS = (0, 1, 2, 3, 4, 4, 5, 5, 5)
_WEIGHTS = (*(0.9 * log(p / (1.0 - p)) for p in _CENTRES * _KINDS), *(0.0,) * 7)

_FIRST_HOPE = 0.6
"""Chance of a drafted token before anything is known."""

_HOPE_RATE, _HOPE_RATE_OF_ALL = 0.2, 0.02

_OPTIMISM = 0.1
"""A new text may suit the draft model better than most: so much better, until it shows."""

_FIRST_LENGTH = 128.0
"""Tokens of a response before any was seen."""


class Costs(Protocol):
    """Seconds of a pass by row count; `planning.PassTime` is one."""

    def cost(self, rows: int) -> float: ...

    def observe(self, rows: int, seconds: float) -> None: ...

    def relax(self) -> None: ...


@dataclass(slots=True)
class _Seat:
    """What is remembered of one request.

    Attributes:
        length: tokens of the text that were followed.
        hope: average chance of its guesses lately.
    """

    spelling: Spelling
    sampler: Sampler
    hope: float
    track: Track
    luck: Luck
    offer: Offer
    length: int = 0


@dataclass(slots=True)
class _Growth:
    """A draft under way.

    Attributes:
        budget: most nodes.
        left: how many of them are not used yet.
        feed: ids that the next pass computes.
        tip: the node that the next guess follows.
        reach: chance of the tip to be reached and taken.
        written: the draft's own ids so far, and how probable it held each.
    """

    seat: _Seat
    context: Context
    budget: int
    sampler: Sampler
    left: int
    feed: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    tip: int = ROOT
    reach: float = 1.0
    done: bool = False


class ModelDrafter(Remembering):
    """Drafts with a smaller model; implements `core.CostlyDrafter`.

    Args:
        model: the draft model; its cache pages are this drafter's alone.
        translator: between the target's tokens and the draft model's.
        costs: pass times of the draft model.
        clock: seconds.

    Attributes:
        pairing: how the two vocabularies fit.
        costs: pass times of the draft model, corrected while it runs.
        broken: what ended drafting for good, None while it works.
    """

    name = "model"

    def __init__(
        self,
        model: Target,
        translator: Translator,
        costs: Costs,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.pairing = translator.pairing
        self.cache = DraftCache(model)
        self.broken: str | None = None
        self._translator = translator
        self._choices = Choices(self.pairing, translator.draft.vocab_size)
        self._telling = self.pairing.mode == "text"
        self._ends = translator.target.eog_ids
        self.costs = costs
        self._clock = clock
        self.reset()

    def propose(self, context: Context, budget: int) -> Draft:
        return self.propose_many([context], [budget], None)[0]

    def propose_many(
        self, contexts: Sequence[Context], budgets: Sequence[int], prices: Prices | None
    ) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        if self.broken is not None:
            return drafts
        outlook = None if prices is None else Outlook(prices, self.costs.cost)
        growths = [self._begin(c, b) for c, b in zip(contexts, budgets, strict=True)]
        asked = [i for i, growth in enumerate(growths) if growth is not None]
        if outlook is not None:
            hopes = [self._expect(growth) for growth in growths if growth is not None]
            asked = [asked[i] for i in outlook.open(hopes)]
        if not asked:
            self.costs.relax()
        going = self._seated([growth for i in asked if (growth := growths[i]) is not None])
        try:
            self._grow(going, outlook)
        except PacelineError as error:
            self._break(error)
            return drafts
        for i in asked:
            growth = growths[i]
            if growth is not None and growth.written:
                drafts[i] = self._finish(growth)
        return drafts

    def price(self, context: Context) -> float:
        seat = self._seats.get(context.request)
        if seat is None:
            return self.costs.cost(len(context.tokens))
        lag = len(seat.spelling.ids) - len(seat.track) + len(context.tokens) - seat.length
        return self.costs.cost(max(1, lag))

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

    def reset(self) -> None:
        """Forget all text and all that was learnt; also after an interruption."""
        self.calibration = Calibration(_WEIGHTS)
        self._hope = _FIRST_HOPE
        self._mean_length = _FIRST_LENGTH
        self._seats: dict[int, _Seat] = {}
        self.cache.clear()

    def _resume_hope(self, hope: float, hoped: int) -> None:  # noqa: ARG002
        self._hope = hope

    def _hope_so_far(self) -> tuple[float, int]:
        return self._hope, 0

    def _begin(self, context: Context, budget: int) -> _Growth | None:
        if budget <= 0 or not context.tokens:
            return None
        seat = self._seats.get(context.request)
        if seat is None:
            seat = self._seats[context.request] = self._new_seat(context)
        self._follow(seat, context)
        self.cache.settle(seat.track, seat.spelling.ids, seat.spelling.loose)
        seat.offer = Offer()
        return _Growth(seat, context, budget, seat.sampler.ahead(), budget) if seat.spelling.ids else None

    def _new_seat(self, context: Context) -> _Seat:
        spelling = TextSpelling(self._translator) if self._telling else TokenSpelling(self._translator)
        sampler = request_sampler(context, self._choices.size, self._ends)
        hope = min(0.98, self._hope + _OPTIMISM)
        return _Seat(spelling, sampler, hope, Track(), QuickLuck(), Offer())

    def _follow(self, seat: _Seat, context: Context) -> None:
        """Learn what became of the last guesses, and take in what was written."""
        written = context.tokens[seat.length :]
        if not written:
            return
        if seat.length:
            seat.offer.learn(written, self.calibration, seat.luck)
        seat.offer = Offer()
        seat.spelling.follow(written)
        for token in written[max(0, context.prompt_length - seat.length) :]:
            if token < self._choices.size:
                seat.sampler.advance(token)
        seat.length = len(context.tokens)

    def _expect(self, growth: _Growth) -> Hope:
        seat, context = growth.seat, growth.context
        rows = self.cache.missing(seat.track, seat.spelling.ids)
        written = len(context.tokens) - context.prompt_length
        most = context.params.max_tokens
        left = self._mean_length if most is None else min(self._mean_length, most - written)
        return Hope(seat.hope, growth.budget, rows, left * (1.0 - seat.hope))

    def _seated(self, growths: Sequence[_Growth]) -> list[_Growth]:
        """Those that find room in the cache, each for as many tokens as may follow."""
        seated: list[_Growth] = []
        for growth in growths:
            seat, ids = growth.seat, growth.seat.spelling.ids
            more = min(growth.budget, self.model.context_limit - len(ids))
            tracks = [other.seat.track for other in seated]
            if more > 0 and self.cache.open(seat.track, ids, more, tracks):
                growth.budget = growth.left = more
                growth.feed = ids[len(seat.track) :]
                seated.append(growth)
        return seated

    def _grow(self, going: list[_Growth], outlook: Outlook | None) -> None:
        while going:
            start = self._clock()
            logits = self.cache.run([(growth.seat.track, growth.feed) for growth in going])
            for growth, row in zip(going, logits, strict=True):
                self._extend(growth, row, outlook)
            seconds = self._clock() - start
            self.costs.observe(sum(len(growth.feed) for growth in going), seconds)
            for growth in going:
                growth.feed = growth.written[-1:]
            going = [growth for growth in going if not growth.done]
            if outlook is not None:
                outlook.spent += seconds
                chosen = outlook.onward([growth.reach * growth.seat.hope for growth in going])
                going = [going[i] for i in chosen]

    def _extend(self, growth: _Growth, logits: Floats, outlook: Outlook | None) -> None:
        """Write one more token; where ids translate it is a node, and its rival beside it if that pays."""
        choices = self._choices
        values = choices.values(logits)
        position = self._position(growth)
        try:
            index, probability = choices.pick(values, growth.sampler, position)
        except RequestError:  # the target will say so, if it comes to the same
            growth.done = True
            return
        token, parent, above = choices.places[index], growth.tip, growth.reach
        features = self._features(growth, _FIRST, probability)
        chance = self.calibration.chance(features, growth.seat.luck.log_odds)
        growth.reach = above * chance
        growth.left -= 1
        growth.seat.hope += _HOPE_RATE * (chance - growth.seat.hope)
        self._hope += _HOPE_RATE_OF_ALL * (chance - self._hope)
        if outlook is not None:
            outlook.add(growth.reach)
        if not self._telling:
            offer = growth.seat.offer
            offer.guesses[parent] = [(token, chance, features)]
            growth.tip = offer.add(parent, token, chance)
            if outlook is not None and growth.left > 0 and outlook.worthwhile(above * (1.0 - chance)):
                rival = choices.pick_rival(values, index, growth.sampler, position)
                self._add_rival(growth, parent, above * (1.0 - chance), rival, outlook)
        growth.written.append(choices.written[index])
        growth.probabilities.append(probability)
        growth.sampler.advance(token)
        growth.done = growth.left <= 0 or self._ends_text(growth, token)

    def _add_rival(
        self,
        growth: _Growth,
        parent: int,
        left: float,
        rival: tuple[int, float] | None,
        outlook: Outlook,
    ) -> None:
        """Offer the second choice beside a first that fails with chance `left`, if it is worth a row."""
        if rival is None:
            return
        token, share = self._choices.places[rival[0]], rival[1]
        offer = growth.seat.offer
        features = self._features(growth, _SECOND, share)
        chance = self.calibration.chance(features, growth.seat.luck.log_odds)
        offer.guesses[parent] = [*offer.guesses[parent], (token, chance, features)]
        if outlook.worthwhile(left * chance):
            first = offer.chances[growth.tip]
            offer.add(parent, token, (1.0 - first) * chance)
            outlook.add(left * chance)
            growth.left -= 1

    def _position(self, growth: _Growth) -> int:
        """Where, in the target's tokens, the next one will stand."""
        tokens = growth.context.tokens
        if self._telling and not growth.context.params.greedy:
            return len(tokens) + len(retell(self._translator, tokens[-LOOK_BEHIND:], growth.written))
        return len(tokens) + len(growth.written)

    def _features(self, growth: _Growth, kind: int, probability: float) -> Features:
        """What decides the chance of the guess at the tip."""
        if kind == _FIRST:
            kind += 2 * self._telling + (not growth.context.params.greedy)
        return kind * len(_CENTRES) + bisect_right(_EDGES, probability), _depth(len(growth.written))

    def _ends_text(self, growth: _Growth, token: int) -> bool:
        if self._telling:
            return growth.written[-1] in self._translator.draft.special_ids
        return token in self._ends and not growth.context.params.ignore_eos

    def _finish(self, growth: _Growth) -> Draft:
        if self._telling:
            self._tell(growth)
        return growth.seat.offer.draft(self.name)

    def _tell(self, growth: _Growth) -> None:
        """Make nodes of the target's tokens for what was written."""
        offer, probabilities = growth.seat.offer, growth.probabilities
        told = retell(self._translator, growth.context.tokens[-LOOK_BEHIND:], growth.written)
        kind = _FIRST + 2 + (not growth.context.params.greedy)
        done = 0
        for depth, (token, n) in enumerate(told[: growth.budget]):
            bucket = bisect_right(_EDGES, prod(probabilities[done:n]))
            features = (kind * len(_CENTRES) + bucket, _depth(depth))
            chance = self.calibration.chance(features, growth.seat.luck.log_odds)
            offer.guesses[growth.tip] = [(token, chance, features)]
            growth.tip = offer.add(growth.tip, token, chance)
            done = max(done, n)

    def _break(self, error: PacelineError) -> None:
        self.broken = error.message
        _log.warning("the draft model is of no use and stays off: %s", error.message)
        self.reset()


def _depth(depth: int) -> int:
    return _DEPTH + (_DEPTH_CLASS[depth] if depth < len(_DEPTH_CLASS) else 6)
