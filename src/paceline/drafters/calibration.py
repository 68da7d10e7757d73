"""From "what kind of guess is this" to "how likely is it right", learnt while running.

A drafter describes each guess by a few features (how long the match, how often seen, which source, ...).
The chance is a sum of one weight per feature on the scale of log-odds, plus the luck of the request: a
logistic regression, trained online. It learns from every guess whose parent came true, whether or not
the planner bought it: the committed text itself says what would have been right, so nothing need be spent
on finding out. A guess behind a wrong one teaches nothing and is not counted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

Features = tuple[int, ...]


class Calibration:
    """One weight per feature, kept for the life of an `LLM`.

    Args:
        weights: [features] log-odds to start from.

    Attributes:
        seen: guesses that each weight comes from.
        judged: guesses that were judged in all.
    """

    FIRST_RATE = 0.2
    FADE = 60.0
    LAST_RATE = 0.01
    """The step shrinks from FIRST_RATE as 1 / (1 + observations / FADE), but never below LAST_RATE, so that
    the weights follow when the kind of traffic changes."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = list(weights)
        self.seen = [0] * len(weights)
        self.judged = 0

    def chance(self, features: Features, luck: float = 0.0) -> float:
        weights = self.weights
        for feature in features:
            luck += weights[feature]
        return 1.0 / (1.0 + math.exp(-luck))

    def record(self, features: Features, chance: float, hit: bool) -> None:
        """Learn that a guess given `chance` was right or wrong."""
        miss = hit - chance
        self.judged += 1
        for feature in features:
            seen = self.seen[feature] = self.seen[feature] + 1
            rate = max(self.LAST_RATE, self.FIRST_RATE / (1.0 + seen / self.FADE))
            self.weights[feature] += rate * miss

    def resume(self, weights: Sequence[float], seen: Sequence[int]) -> None:
        """Go on from what was learnt elsewhere."""
        self.weights, self.seen = list(weights), list(seen)


class Luck:
    """How much more or less often than the calibration says a single request's guesses come true."""

    __slots__ = ("log_odds",)

    RATE = 0.12
    LIMIT = 3.0

    def __init__(self) -> None:
        self.log_odds = 0.0

    def record(self, chance: float, hit: bool) -> None:
        self._move(self.RATE, chance, hit)

    def _move(self, rate: float, chance: float, hit: bool) -> None:
        moved = self.log_odds + rate * (hit - chance)
        self.log_odds = max(-self.LIMIT, min(self.LIMIT, moved))


class QuickLuck(Luck):
    """Believes the first guesses most, for drafters whose guesses cost much: few must do to judge a text."""

    __slots__ = ("_judged",)

    FIRST_RATE = 0.4
    FADE = 8.0

    def __init__(self) -> None:
        super().__init__()
        self._judged = 0

    def record(self, chance: float, hit: bool) -> None:
        self._judged += 1
        self._move(max(self.RATE, self.FIRST_RATE / (1.0 + self._judged / self.FADE)), chance, hit)


_LENGTH_CLASS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 6, *(7,) * 6, *(8,) * 8)

LENGTH_CLASSES = 10


def length_class(length: int) -> int:
    """Sort match lengths into LENGTH_CLASSES classes: 0 to 4 alone, then ever wider, 24 and more together."""
    return _LENGTH_CLASS[length] if length < 24 else 9


_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
_CENTRES = (0.01, 0.03, 0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.975, 0.995)
_DEPTH_CLASS = (0, 1, 2, 3, 4, 4, 5, 5, 5)
_DEPTHS = 7


class Confidence(Calibration):
    """Chances of guesses that come with a probability of their own: one weight per kind of guess and class of
    probability, which starts out from that probability, and one per depth.

    Args:
        kinds: how many ways there are to arrive at a guess.
    """

    def __init__(self, kinds: int) -> None:
        plain = (0.9 * math.log(p / (1.0 - p)) for p in _CENTRES * kinds)
        super().__init__((*plain, *(0.0,) * _DEPTHS))
        self._depth = kinds * len(_CENTRES)

    def features(self, kind: int, probability: float, depth: int) -> Features:
        """What decides the chance of a guess that is `depth` tokens ahead, from 0."""
        row = kind * len(_CENTRES) + bisect_right(_EDGES, probability)
        return row, self._depth + (_DEPTH_CLASS[depth] if depth < len(_DEPTH_CLASS) else _DEPTHS - 1)
