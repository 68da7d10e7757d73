"""From "what kind of guess is this" to "how likely is it right", learnt while running.

A drafter describes each guess by a few features (how long the match, how often seen, which source, ...).
The chance is a sum of one weight per feature on the scale of log-odds, plus the luck of the request: a
logistic regression, trained online. It learns from every guess whose parent came true, whether or not
the planner bought it: the committed text itself says what would have been right, so nothing need be spent
on finding out. A guess behind a wrong one teaches nothing and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Features = tuple[int, ...]


class Calibration:
    """One weight per feature, kept for the life of an `LLM`.

    Args:
        weights: [features] log-odds to start from.
    """

    FIRST_RATE = 0.2
    FADE = 60.0
    LAST_RATE = 0.01
    """The step shrinks from FIRST_RATE as 1 / (1 + observations / FADE), but never below LAST_RATE, so that
    the weights follow when the kind of traffic changes."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = list(weights)
        self._seen = [0] * len(weights)

    def chance(self, features: Features, luck: float = 0.0) -> float:
        weights = self.weights
        for feature in features:
            luck += weights[feature]
        return 1.0 / (1.0 + math.exp(-luck))

    def record(self, features: Features, chance: float, hit: bool) -> None:
        """Learn that a guess given `chance` was right or wrong."""
        miss = hit - chance
        for feature in features:
            seen = self._seen[feature] = self._seen[feature] + 1
            rate = max(self.LAST_RATE, self.FIRST_RATE / (1.0 + seen / self.FADE))
            self.weights[feature] += rate * miss


class Luck:
    """How much more or less often than the calibration says a single request's guesses come true."""

    __slots__ = ("log_odds",)

    RATE = 0.12
    LIMIT = 3.0

    def __init__(self) -> None:
        self.log_odds = 0.0

    def record(self, chance: float, hit: bool) -> None:
        moved = self.log_odds + self.RATE * (hit - chance)
        self.log_odds = max(-self.LIMIT, min(self.LIMIT, moved))


_LENGTH_CLASS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 6, *(7,) * 6, *(8,) * 8)

LENGTH_CLASSES = 10


def length_class(length: int) -> int:
    """Sort match lengths into LENGTH_CLASSES classes: 0 to 4 alone, then ever wider, 24 and more together."""
    return _LENGTH_CLASS[length] if length < 24 else 9
