"""A draft under construction, which afterwards remembers what it claimed, so that its drafter can learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core import ROOT, Draft
from paceline.drafters.calibration import Calibration, Features, Luck

Guess = tuple[int, float, Features]
"""(token, chance once the guesses before it at the same place have failed, features)"""


class Offer:
    """Nodes put forward, parents first, and the guesses made at each place, surest first.

    A place is ROOT or a node. Guesses count for learning also where no node was made of them.
    """

    __slots__ = ("_nodes", "chances", "guesses", "parents", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        self.guesses: dict[int, Sequence[Guess]] = {}
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, chance: float) -> int:
        """Put a node forward; `chance` is given the parent, among its siblings. Returns its index."""
        node = len(self.tokens)
        self._nodes[parent, token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        return node

    def draft(self, source: str) -> Draft:
        """What was put forward so far."""
        return Draft([*self.tokens], [*self.parents], [*self.chances], (source,) * len(self.tokens))

    def learn(self, written: Sequence[int], calibration: Calibration, luck: Luck) -> None:
        """Let `judge` compare with the tokens `written` since."""
        judge(lambda place: self.guesses.get(place, ()), self._child, written, calibration, luck)

    def _child(self, place: int, token: int) -> int:
        return self._nodes.get((place, token), ROOT)


def judge(
    guesses: Callable[[int], Sequence[Guess]],
    child: Callable[[int, int], int],
    written: Sequence[int],
    calibration: Calibration,
    luck: Luck,
) -> None:
    """Learn from what was written: every guess at a place the text came by was right or wrong.

    Args:
        guesses: those made at a place, surest first.
        child: the node that a token leads to from a place, or ROOT if there is none.
        written: [n] tokens since the offer.
    """
    node = ROOT
    for token in written:
        for guess, chance, features in guesses(node):
            hit = guess == token
            luck.record(chance, hit)
            calibration.record(features, chance, hit)
            if hit:
                break
        if (node := child(node, token)) == ROOT:
            return
