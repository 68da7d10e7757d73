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
from dataclasses import dataclass, replace
from math import log
from typing import Protocol

import numpy as np

from paceline.core import ROOT, Context, Draft, Floats, Ids, Outcome, Prices, SamplingParams, Target
from paceline.drafters.calibration import Calibration, Features, Luck
from paceline.drafters.draft_cache import DraftCache, Track
from paceline.drafters.offer import Offer
from paceline.drafters.outlook import Hope, Outlook
from paceline.errors import PacelineError, RequestError
from paceline.sampling.sampler import Sampler
from paceline.text.pairing import Pairing
from paceline.text.respelling import Spelling, TextSpelling, TokenSpelling, Translator, retell

_log = logging.getLogger("paceline")

# Layout of the features: how the guess was made and how probable the draft model holds it, then the depth.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
_CENTRES = (0.01, 0.03, 0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.975, 0.995)
_LIKELIEST, _DRAWN, _SECOND, _RETOLD = (i * len(_CENTRES) for i in range(4))
_DEPTH = 4 * len(_CENTRES)
_DEPTH_CLASS = (0, 1, 2, 3, 4, 4, 5, 5, 5)
_WEIGHTS = (*(0.9 * log(p / (1.0 - p)) for p in _CENTRES * 4), *(0.0,) * 7)

_FIRST_HOPE = 0.6
"""Chance of a drafted token before anything is known."""

_HOPE_RATE = 0.08

_FIRST_LENGTH = 128.0
"""Tokens of a response before any was seen."""


class Costs(Protocol):
    """Seconds of a pass by row count; `planning.PassTime` is one."""

    def cost(self, rows: int) -> float: ...

    def observe(self, rows: int, seconds: float) -> None: ...


@dataclass(slots=True)
class _Seat:
    """What is remembered of one request.

    Attributes:
        length: tokens of the text that were followed.
        hope: average chance of its guesses lately.
    """

    spelling: Spelling
    sampler: Sampler | None
    hope: float
    track: Track
    luck: Luck
    offer: Offer
    length: int = 0


@dataclass(slots=True)
class _Growth:
    """A draft under way.

    Attributes:
        feed: ids that the next pass computes.
        tip: the node that the next guess follows.
        reach: chance of the tip to be reached and taken.
        written: the draft's own ids so far, and how probable it held each.
    """

    seat: _Seat
    context: Context
    budget: int
    feed: list[int]
    sampler: Sampler | None
    written: list[int]
    probabilities: list[float]
    tip: int = ROOT
    reach: float = 1.0
    depth: int = 0
    done: bool = False


class ModelDrafter:
    """Drafts with a smaller model; implements `core.CostlyDrafter`.

    Args:
        model: the draft model; its cache pages are this drafter's alone.
        translator: between the target's tokens and the draft model's.
        costs: pass times of the draft model.
        clock: seconds.

    Attributes:
        pairing: how the two vocabularies fit.
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
        self._choices = _Choices(self.pairing)
        self._ends = translator.target.eog_ids
        self._costs = costs
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
        outlook = None if prices is None else Outlook(prices, self._costs.cost)
        growths = [self._begin(c, b) for c, b in zip(contexts, budgets, strict=True)]
        asked = [i for i, growth in enumerate(growths) if growth is not None]
        if outlook is not None:
            hopes = [self._expect(growth) for growth in growths if growth is not None]
            asked = [asked[i] for i in outlook.open(hopes)]
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
            return self._costs.cost(len(context.tokens))
        lag = len(seat.spelling.ids) - len(seat.track) + len(context.tokens) - seat.length
        return self._costs.cost(max(1, lag))

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

    def _begin(self, context: Context, budget: int) -> _Growth | None:
        if budget <= 0 or not context.tokens:
            return None
        seat = self._seats.get(context.request)
        if seat is None:
            seat = self._seats[context.request] = self._new_seat(context)
        self._follow(seat, context)
        self.cache.settle(seat.track, seat.spelling.ids, seat.spelling.loose)
        sampler = None if seat.sampler is None else seat.sampler.ahead()
        return _Growth(seat, context, budget, [], sampler, [], []) if seat.spelling.ids else None

    def _new_seat(self, context: Context) -> _Seat:
        text = self.pairing.mode == "text"
        spelling = TextSpelling(self._translator) if text else TokenSpelling(self._translator)
        sampler = None if text else _sampler(context, self._choices.size, self._ends)
        return _Seat(spelling, sampler, self._hope, Track(), Luck(), Offer())

    def _follow(self, seat: _Seat, context: Context) -> None:
        """Learn what became of the last guesses, and take in what was written."""
        written = context.tokens[seat.length :]
        if not written:
            return
        if seat.length:
            seat.offer.learn(written, self.calibration, seat.luck)
        seat.offer = Offer()
        seat.spelling.follow(written)
        if seat.sampler is not None:
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
                growth.budget = more
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
            self._costs.observe(sum(len(growth.feed) for growth in going), seconds)
            for growth in going:
                growth.feed = growth.written[-1:]
            going = [growth for growth in going if not growth.done]
            if outlook is not None:
                outlook.spent += seconds
                chosen = outlook.onward([growth.reach * growth.seat.hope for growth in going])
                going = [going[i] for i in chosen]

    def _extend(self, growth: _Growth, logits: Floats, outlook: Outlook | None) -> None:
        """Write one more token, and its rival beside it if that pays."""
        if self.pairing.mode == "text":
            self._write_text(growth, logits, outlook)
            return
        seat, offer = growth.seat, growth.seat.offer
        row = self._choices.row(logits)
        position = len(growth.context.tokens) + growth.depth
        try:
            token, probability = _pick(row, growth.sampler, position)
        except RequestError:  # the target will say so, if it comes to the same
            growth.done = True
            return
        kind = _LIKELIEST if growth.context.params.greedy else _DRAWN
        features = (kind + _bucket(probability), _depth(growth.depth))
        chance = self.calibration.chance(features, seat.luck.log_odds)
        guesses = offer.guesses[growth.tip] = [(token, chance, features)]
        parent, above = growth.tip, growth.reach
        growth.tip = offer.add(parent, token, chance)
        growth.reach = above * chance
        growth.budget -= 1
        self._note(growth, chance)
        if outlook is not None:
            outlook.add(growth.reach)
            if growth.budget > 0 and outlook.worthwhile(above * (1.0 - chance)):
                rival, share = _second(row, token, growth.sampler, position)
                features = (_SECOND + _bucket(share), _depth(growth.depth))
                second = self.calibration.chance(features, seat.luck.log_odds)
                guesses.append((rival, second, features))
                if outlook.worthwhile(above * (1.0 - chance) * second):
                    offer.add(parent, rival, (1.0 - chance) * second)
                    outlook.add(above * (1.0 - chance) * second)
                    growth.budget -= 1
        growth.depth += 1
        growth.written.append(self._choices.to_draft[token])
        if growth.sampler is not None:
            growth.sampler.advance(token)
        growth.done = growth.budget <= 0 or (token in self._ends and not growth.context.params.ignore_eos)

    def _write_text(self, growth: _Growth, logits: Floats, outlook: Outlook | None) -> None:
        """Write one more token of the draft's own; what it means for the target is told at the end."""
        known = logits[: self._translator.draft.vocab_size]
        token = int(known.argmax())
        probability = _share(known, token)
        chance = self.calibration.chance(
            (_RETOLD + _bucket(probability), _depth(growth.depth)), growth.seat.luck.log_odds
        )
        growth.reach *= chance
        growth.depth += 1
        growth.written.append(token)
        growth.probabilities.append(probability)
        self._note(growth, chance)
        if outlook is not None:
            outlook.add(growth.reach)
        growth.done = growth.depth >= growth.budget or token in self._translator.draft.special_ids

    def _note(self, growth: _Growth, chance: float) -> None:
        growth.seat.hope += _HOPE_RATE * (chance - growth.seat.hope)
        self._hope += 0.1 * _HOPE_RATE * (chance - self._hope)

    def _finish(self, growth: _Growth) -> Draft:
        offer = growth.seat.offer
        if self.pairing.mode == "text":
            told = retell(self._translator, growth.context.tokens, growth.written)
            done = 0
            for depth, (token, n) in enumerate(told[: growth.budget]):
                probability = float(np.prod(growth.probabilities[done:n]))
                done = max(done, n)
                features: Features = (_RETOLD + _bucket(probability), _depth(depth))
                chance = self.calibration.chance(features, growth.seat.luck.log_odds)
                offer.guesses[growth.tip] = [(token, chance, features)]
                growth.tip = offer.add(growth.tip, token, chance)
        return offer.draft(self.name)

    def _break(self, error: PacelineError) -> None:
        self.broken = error.message
        _log.warning("the draft model is of no use and stays off: %s", error.message)
        self.reset()


class _Choices:
    """The draft's logits as logits of the target's ids."""

    def __init__(self, pairing: Pairing) -> None:
        self.to_draft: list[int] = pairing.to_draft.tolist()
        self._same = pairing.mode == "same"
        draft_vocab, target_vocab = len(pairing.to_target), len(pairing.to_draft)
        self.size = min(draft_vocab, target_vocab) if self._same else target_vocab
        self._masked: Ids = np.flatnonzero(pairing.to_target[: self.size] < 0).astype(np.int32)
        self._known: Ids = np.flatnonzero(pairing.to_draft >= 0).astype(np.int32)
        self._sources: Ids = pairing.to_draft[self._known]
        self._row: Floats = np.full(self.size, -np.inf, np.float32)

    def row(self, logits: Floats) -> Floats:
        """[size] logits, -inf where the draft must not guess; overwritten by the next call."""
        if self._same:
            row = logits[: self.size]
            row[self._masked] = -np.inf
            return row
        self._row[self._known] = logits[self._sources]
        return self._row


def _sampler(context: Context, size: int, ends: frozenset[int]) -> Sampler:
    """The request's own sampler, as far as the draft's vocabulary reaches."""
    params: SamplingParams = context.params
    known = {token: bias for token, bias in params.logit_bias.items() if token < size}
    stops = frozenset() if params.ignore_eos else ends
    stops |= frozenset(params.stop_token_ids)
    prompt = [token for token in context.tokens[: context.prompt_length] if token < size]
    its = replace(params, logit_bias=known, stop_token_ids=(), logprobs=None)
    return Sampler(its, prompt, stops, size, context.seed)


def _pick(row: Floats, sampler: Sampler | None, position: int) -> tuple[int, float]:
    """The token that the request's sampler takes, and its probability."""
    best = int(row.argmax())
    token = best if sampler is None else sampler.pick(row, best, position)
    temperature = 1.0 if sampler is None or sampler.params.greedy else sampler.params.temperature
    return token, _share(row, token, temperature)


def _second(row: Floats, token: int, sampler: Sampler | None, position: int) -> tuple[int, float]:
    """The token that would have been taken without the first, and its share of what the first leaves."""
    kept, row[token] = row[token], -np.inf
    rival, share = _pick(row, sampler, position)
    row[token] = kept
    return rival, share


def _share(row: Floats, token: int, temperature: float = 1.0) -> float:
    """softmax(row / temperature)[token]"""
    scaled = (row - row.max()) / np.float32(max(temperature, 1e-3))
    np.exp(scaled, out=scaled)
    return float(scaled[token] / scaled.sum())


def _bucket(probability: float) -> int:
    return bisect_right(_EDGES, probability)


def _depth(depth: int) -> int:
    return _DEPTH + (_DEPTH_CLASS[depth] if depth < len(_DEPTH_CLASS) else 6)
