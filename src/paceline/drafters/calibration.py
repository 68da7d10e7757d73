"""From "what kind of guess is this" to "how likely is it right", learnt while running.

A drafter sorts its guesses into buckets (match length, how often seen, ...). Each bucket keeps the share
of its guesses that came true, over all requests; each request keeps one number beside that, how much
luckier or unluckier it is than the average. Both learn from every guess whose parent came true, whether
or not it was bought, because the committed text says what would have been right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Calibration:
    """Share of guesses that came true, by bucket; kept for the life of an `LLM`.

    Args:
        priors: [buckets] chance of each bucket before anything was seen.
        strength: how many observations a prior is worth.
        memory: observations after which older ones fade (the running mean becomes exponential).
    """

    def __init__(self, priors: Sequence[float], *, strength: float = 12.0, memory: float = 1500.0) -> None:
        self.means = list(priors)
        self._weights = [strength] * len(priors)
        self._memory = memory

    def record(self, bucket: int, hit: bool) -> None:
        weight = min(self._weights[bucket] + 1.0, self._memory)
        self._weights[bucket] = weight
        self.means[bucket] += (hit - self.means[bucket]) / weight


class Luck:
    """How much better or worse than the calibration a single request does, as a factor on the odds.

    A step of gradient descent on log loss per observation: a run of failures silences a request within
    about ten guesses, a run of hits wakes it as quickly.
    """

    __slots__ = ("_log_odds", "odds")

    RATE = 0.25
    LIMIT = 3.0

    def __init__(self) -> None:
        self._log_odds = 0.0
        self.odds = 1.0

    def adjust(self, chance: float) -> float:
        scaled = chance * self.odds
        return scaled / (1.0 - chance + scaled)

    def record(self, predicted: float, hit: bool) -> None:
        moved = self._log_odds + self.RATE * (hit - predicted)
        self._log_odds = max(-self.LIMIT, min(self.LIMIT, moved))
        self.odds = math.exp(self._log_odds)
