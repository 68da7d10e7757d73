"""A small language model guesses for the large one, in its own words if it must.

It follows the request's text in a KV cache of its own, and drafts the likeliest chain with, where it was
unsure, its second choice beside it. Where the request samples, it samples too, with the request's own
noise: two models that see the same noise and nearly the same probabilities mostly draw the same token.

How sure the draft model says it is tells how likely the target agrees, but not exactly: the probability
is one feature of a chance that is learnt while running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from paceline.core import ROOT, Context, Draft, Floats, Target
from paceline.drafters.calibration import QuickLuck
from paceline.drafters.choice import Choices, request_sampler
from paceline.drafters.draft_cache import DraftCache, Track
from paceline.drafters.network import Costs, Growth, NetworkDrafter, Seat
from paceline.drafters.offer import Offer
from paceline.drafters.outlook import Outlook
from paceline.errors import RequestError
from paceline.sampling.sampler import Sampler
from paceline.text.respelling import (
    LOOK_BEHIND,
    Spelling,
    TextSpelling,
    TokenSpelling,
    Translator,
    retell,
)

# How a guess was made, for its chance: a first choice, the likeliest or a drawn one, the same where the text
# is retold, or a second choice.
_FIRST, _RETOLD, _SECOND = 0, 2, 4

_OPTIMISM = 0.1
"""A new text may suit the draft model better than most: so much better, until it shows."""


@dataclass(slots=True)
class _Seat(Seat[Track]):
    spelling: Spelling = field(kw_only=True)


@dataclass(slots=True)
class _Growth(Growth[_Seat]):
    """A draft under way.

    Attributes:
        kind: of its first choices.
        sampler: stands behind what is written.
        budget: most nodes, now that it has found room.
        feed: ids that the next pass computes.
        tip: the node that the next guess follows.
        reach: chance of the tip to be reached and taken.
        written: the draft's own ids so far, and how probable it held each.
    """

    kind: int
    sampler: Sampler = field(init=False)
    budget: int = field(init=False)
    feed: Sequence[int] = field(init=False)
    written: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    tip: int = ROOT
    reach: float = 1.0
    done: bool = False


class ModelDrafter(NetworkDrafter[_Seat, _Growth]):
    """Drafts with a smaller model; implements `core.CostlyDrafter`.

    Args:
        model: the draft model; its cache pages are this drafter's alone.
        translator: between the target's tokens and the draft model's.
        costs: pass times of the draft model.
        clock: seconds.

    Attributes:
        pairing: how the two vocabularies fit.
    """

    KINDS = 5
    HOPE_RATE = 0.2
    WORTH = 50

    cache: DraftCache

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
        self._translator = translator
        self._choices = Choices(self.pairing, translator.draft.vocab_size)
        self._telling = self.pairing.mode == "text"
        self._ends = translator.target.eog_ids
        super().__init__("model", "draft model", DraftCache(model), costs, clock=clock)

    def price(self, context: Context) -> float:
        seat = self._seats.get(context.request)
        if seat is None:
            return self.costs.cost(len(context.tokens))
        lag = len(seat.spelling.ids) - len(seat.track) + len(context.tokens) - seat.length
        return self.costs.cost(max(1, lag))

    def _begin(self, context: Context, budget: int) -> _Growth | None:
        if budget <= 0 or not context.tokens:
            return None
        seat = self._seats.get(context.request) or self._new_seat(context)
        self._follow(seat, context)
        ids = seat.spelling.ids
        self.cache.settle(seat.track, ids, seat.spelling.loose)
        seat.offer = Offer()
        kind = _FIRST + _RETOLD * self._telling + (not context.params.greedy)
        return _Growth(seat, context, ids, budget, kind) if ids else None

    def _new_seat(self, context: Context) -> _Seat:
        spelling = TextSpelling(self._translator) if self._telling else TokenSpelling(self._translator)
        sampler = request_sampler(context, self._choices.size, self._ends)
        hope = min(0.98, self._hope + _OPTIMISM)
        seat = self._seats[context.request] = _Seat(sampler, Track(), hope, QuickLuck(), spelling=spelling)
        return seat

    def _read(self, seat: _Seat, written: Sequence[int], start: int) -> None:
        seat.spelling.follow(written)
        for token in written[start:]:
            if token < self._choices.size:
                seat.sampler.advance(token)

    def _room(self, growth: _Growth) -> int:
        growth.left = min(growth.left, self.model.context_limit - len(growth.ids))
        return growth.left

    def _grow(self, going: list[_Growth], outlook: Outlook | None) -> None:
        for growth in going:
            growth.budget = growth.left
            growth.sampler = growth.seat.sampler.ahead()
            growth.feed = growth.ids[len(growth.seat.track) :]
        while going:
            start = self._clock()
            logits = self.cache.run([(growth.seat.track, growth.feed) for growth in going])
            for growth, row in zip(going, logits, strict=True):
                self._extend(growth, row, outlook)
            rows = sum(len(growth.feed) for growth in going)
            self._spend(rows, self._clock() - start, outlook)
            for growth in going:
                growth.feed = growth.written[-1:]
            going = [growth for growth in going if not growth.done]
            if outlook is not None:
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
        features = self.calibration.features(growth.kind, probability, len(growth.written))
        chance = self.calibration.chance(features, growth.seat.luck.log_odds)
        growth.reach = above * chance
        growth.left -= 1
        self._learn_hope(growth.seat, chance)
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
        features = self.calibration.features(_SECOND, share, len(growth.written))
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

    def _ends_text(self, growth: _Growth, token: int) -> bool:
        if self._telling:
            return growth.written[-1] in self._translator.draft.special_ids
        return token in self._ends and not growth.context.params.ignore_eos

    def _finish(self, growth: _Growth) -> Draft:
        if self._telling and growth.written:
            self._tell(growth)
        return growth.seat.offer.draft(self.name)

    def _tell(self, growth: _Growth) -> None:
        """Make nodes of the target's tokens for what was written."""
        offer, probabilities = growth.seat.offer, growth.probabilities
        told = retell(self._translator, growth.context.tokens[-LOOK_BEHIND:], growth.written)
        done = 0
        for depth, (token, n) in enumerate(told[: growth.budget]):
            features = self.calibration.features(growth.kind, prod(probabilities[done:n]), depth)
            chance = self.calibration.chance(features, growth.seat.luck.log_odds)
            offer.guesses[growth.tip] = [(token, chance, features)]
            growth.tip = offer.add(growth.tip, token, chance)
            done = max(done, n)
