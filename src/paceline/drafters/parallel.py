"""P-EAGLE: an EAGLE-3 head that guesses several tokens in one pass (arXiv 2602.01469).

The row of the text's last token is followed by rows of a mask token, whose states are a vector of the
checkpoint's; row k guesses the token k places further. What a draft costs is known beforehand and no row
waits for another, so its length is chosen before the pass; which guesses are worth a row of the target's
pass, second choices too, is decided as for every head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.core import ROOT, Floats, Prices
from paceline.drafters.head import TOPK, HeadDrafter, Place, Tree
from paceline.drafters.head_program import FROM_TARGET, Feed
from paceline.drafters.outlook import STEADY, Hope, Outlook

_NOTHING: Floats = np.zeros(0, np.float32)


class ParallelOutlook(Outlook):
    """Prices of one step in which a draft is made in one pass.

    Args:
        longest: rows that guess.
    """

    def __init__(self, prices: Prices, cost: Callable[[int], float], longest: int) -> None:
        super().__init__(prices, cost)
        self._longest = longest

    def length(self, hopes: Sequence[Hope]) -> int:
        """How many tokens to guess for each of these."""
        rates = self._rates(hopes)
        return 1 + rates.index(max(rates)) if rates else 1

    def _forecast(self, hopes: Sequence[Hope]) -> float:
        return max(self._rates(hopes), default=0.0)

    def _rates(self, hopes: Sequence[Hope]) -> list[float]:
        """Tokens per second of a step with drafts of 1, 2, ... tokens."""
        steady = sum(min(hope.rows, STEADY) for hope in hopes)
        late = 0.0
        for hope in hopes:
            if hope.rows > STEADY:
                more = self._cost(steady + hope.rows - STEADY) - self._cost(steady)
                late += more / max(hope.steps, 1.0)
        rates: list[float] = []
        nodes, tokens = 0, self._prices.tokens
        reach = [1.0] * len(hopes)
        for depth in range(min(self._longest, max((hope.budget for hope in hopes), default=0))):
            going = [i for i, hope in enumerate(hopes) if hope.budget > depth]
            nodes += len(going)
            if nodes > self._most:
                break
            for i in going:
                reach[i] *= hopes[i].chance
                tokens += reach[i]
            spent = late + self._cost(steady + depth * len(hopes))
            rates.append(tokens / (spent + self._row(nodes)))
        return rates


class ParallelDrafter(HeadDrafter):
    """Drafts with rows of masks, in one pass.

    Args:
        mask: the token in rows of masks.
        state: [width of what the head reads] their state.
        longest: rows that guess.
        others: see `HeadDrafter`.
    """

    def __init__(
        self,
        *others: Any,
        mask: int,
        state: Floats,
        longest: int,
        topk: int = TOPK,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(*others, topk=topk, clock=clock or time.perf_counter)
        self._mask, self._state, self.longest = mask, state, longest

    def _outlook(self, prices: Prices) -> Outlook:
        return ParallelOutlook(prices, self.costs.cost, self.longest)

    def _room(self, growth: Tree) -> int:  # noqa: ARG002
        return self.longest

    def _ahead(self) -> int:
        return self.longest - 1

    def _grow(self, going: list[Tree], outlook: Outlook | None) -> None:
        for batch in self._batches(going):
            start = self._clock()
            most = self.longest
            if isinstance(outlook, ParallelOutlook):
                most = outlook.length([self._expect(growth) for growth in batch])
            counts = [min(most, growth.left) for growth in batch]
            feeds = [self._masked(growth, count) for growth, count in zip(batch, counts, strict=True)]
            logits = self.head.run(feeds, FROM_TARGET).logits
            self._spend(sum(len(feed.tokens) for feed in feeds), self._clock() - start, outlook)
            ends = np.cumsum(counts)
            for growth, some in zip(batch, np.split(logits, ends[:-1]), strict=True):
                self._write(growth, some, outlook)

    def _masked(self, growth: Tree, count: int) -> Feed:
        """The rows that are missing of a text, and masks behind them: `count` rows that guess."""
        feed = self._missing(growth)
        self._read_ahead(feed, self.head.max_rows - count + 1)
        growth.seat.track.filed = len(growth.context.tokens) - 1 - growth.seat.track.done
        at, rows = feed.positions[-1], len(feed.tokens)
        places = list(range(at + 1, at + count))
        return Feed(
            table=feed.table,
            tokens=[*feed.tokens, *[self._mask] * (count - 1)],
            positions=[*feed.positions, *places],
            slots=[*feed.slots, *places],
            parents=[ROOT] * (rows + count - 1),
            states=np.concatenate([feed.states, np.tile(self._state, (count - 1, 1))]),
            wanted=list(range(rows - 1, rows + count - 1)),
        )

    def _write(self, growth: Tree, logits: Floats, outlook: Outlook | None) -> None:
        """Offer a guess at each place behind the last, left to right."""
        offer, node = growth.seat.offer, ROOT
        sampler = growth.seat.sampler.ahead()
        for row in logits:
            growth.places[node] = Place(0, ROOT, 0, 0, True, _NOTHING, _NOTHING, sampler)
            first = len(offer.tokens)
            self._expand(growth, node, row, outlook)
            if first not in growth.leaves:  # nothing was offered, or an end
                return
            sampler = sampler.ahead()
            sampler.advance(offer.tokens[first])
            node = first
