"""Whether a draft model's next pass is worth its time: arithmetic on chances and seconds.

A step that spends d seconds on drafting and checks n nodes with path chances p commits base + sum(p)
tokens in d + T(n) seconds. Before the first pass only an average of past chances is known, so the
whole step is forecast with it. Afterwards a pass is made while what it is expected to add is more, per
second, than the step earns so far: gains fall with the depth, so the first pass that lowers the rate ends
the draft (compare the threshold policies of SpecDec++, arXiv 2405.19715).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core import Prices

MARGIN = 1.01
"""A draft model must promise this much over what there is without it."""

INVESTMENT = 1.12
"""So much, where it must first read more than READ tokens: the text may suit it less than most, or end."""

READ = 8

DEPTH = 8
"""How far the forecast looks."""

STEADY = 2
"""Rows of a first pass when every step drafts: the last draft and the bonus. More of them are text to be
caught up with, whose cost is spread over the steps that profit from it."""


@dataclass(slots=True)
class Hope:
    """What is expected of drafting for one request.

    Attributes:
        chance: average chance of a drafted token, given those before it.
        budget: most nodes.
        rows: tokens that the first pass must compute.
        steps: steps still to come that will profit from having caught up.
    """

    chance: float
    budget: int
    rows: int
    steps: float


class Outlook:
    """Prices of one step, and what was spent in it so far.

    Args:
        prices: of the target's pass.
        cost: seconds of a pass of the draft model by row count.
    """

    def __init__(self, prices: Prices, cost: Callable[[int], float]) -> None:
        self._prices = prices
        self._most = len(prices.extra) - 1
        self._cost = cost
        self.spent = 0.0
        self.nodes = 0
        self.tokens = prices.tokens

    def open(self, hopes: Sequence[Hope]) -> list[int]:
        """Indices of the requests to draft for: those whose drafts, together, make the step faster."""
        order = sorted(range(len(hopes)), key=lambda i: -hopes[i].chance)
        plain = self._prices.tokens / self._prices.plain
        best, count, late = 1.0, 0, False
        for n in range(1, len(order) + 1):
            late = late or hopes[order[n - 1]].rows > READ
            gain = self._forecast([hopes[i] for i in order[:n]]) / plain
            if gain > best * ((INVESTMENT if late else MARGIN) if count == 0 else 1.0):
                best, count = gain, n
        return sorted(order[:count])

    def onward(self, gains: Sequence[float]) -> list[int]:
        """Indices of the drafts to make one token longer, given what each is expected to add."""
        order = sorted(range(len(gains)), key=lambda i: -gains[i])
        best, count = self.tokens / (self.spent + self._row(self.nodes)), 0
        tokens = self.tokens
        for n, i in enumerate(order, 1):
            if self.nodes + n > self._most:
                break
            tokens += gains[i]
            rate = tokens / (self.spent + self._cost(n) + self._row(self.nodes + n))
            if rate > best:
                best, count = rate, n
        return sorted(order[:count])

    def worthwhile(self, reach: float) -> bool:
        """Whether one more node with this path chance, that costs no drafting, pays for its row."""
        if self.nodes + 1 > self._most:
            return False
        rate = self.tokens / (self.spent + self._row(self.nodes))
        return reach > rate * (self._row(self.nodes + 1) - self._row(self.nodes))

    def add(self, reach: float) -> None:
        self.nodes += 1
        self.tokens += reach

    def _row(self, nodes: int) -> float:
        return self._prices.plain + self._prices.extra[nodes]

    def _forecast(self, hopes: Sequence[Hope]) -> float:
        """Tokens per second of the best step that drafts for all of these to one depth."""
        steady = sum(min(hope.rows, STEADY) for hope in hopes)
        spent = self._cost(steady)
        for hope in hopes:
            if hope.rows > STEADY:
                late = self._cost(steady + hope.rows - STEADY) - self._cost(steady)
                spent += late / max(hope.steps, 1.0)
        best, nodes, tokens = 0.0, 0, self._prices.tokens
        reach = [1.0] * len(hopes)
        for depth in range(1, DEPTH + 1):
            going = [i for i, hope in enumerate(hopes) if hope.budget >= depth]
            if not going or nodes + len(going) > self._most:
                break
            for i in going:
                reach[i] *= hopes[i].chance
                tokens += reach[i]
            nodes += len(going)
            best = max(best, tokens / (spent + self._row(nodes)))
            spent += self._cost(len(going))
        return best
