"""Prompt lookup: what followed the last time the text ended like this?

Source: prompt lookup decoding (Saxena 2023). The longest suffix of the text, from `longest` down to
`shortest` tokens, that occurred before is found, its most recent occurrence taken, and what followed
there is offered as a chain.
"""

from __future__ import annotations

from paceline.core import ROOT, Context, Draft, Outcome
from paceline.drafters.calibration import Calibration, Luck, length_class
from paceline.drafters.offer import Offer
from paceline.errors import UsageError

# A copied stretch tends to go on: the longer the match so far, the surer the next token.
_WEIGHTS = (-1.5, -1.0, 0.3, 0.8, 1.1, 1.4, 1.6, 2.5, 3.0, 3.5)


class NgramIndex:
    """Most recent position of every n-gram of one text; a token is added in time O(longest).

    An n-gram gets an entry only once its suffix one shorter has been seen twice, which keeps memory near
    two entries per token of new text. Looks at `tokens`, which grows in place, and never changes it.
    """

    def __init__(self, tokens: list[int], shortest: int, longest: int) -> None:
        self.tokens = tokens
        self.shortest = shortest
        self.longest = longest
        self._after: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def follow(self) -> None:
        """Index what was appended to `tokens` since the last call."""
        for i in range(self._seen, len(self.tokens)):
            self._add(i)
        self._seen = len(self.tokens)

    def _add(self, i: int) -> None:
        tokens, after = self.tokens, self._after
        for n in range(self.shortest, min(self.longest, i) + 1):
            key = tuple(tokens[i - n : i])
            before = after.get(key)
            after[key] = i
            if before is None:
                return
            if n < self.longest and before > n:
                after.setdefault(tuple(tokens[before - n - 1 : before]), before)

    def find(self) -> tuple[int, int]:
        """Return (n, position after it) of the longest known suffix's last occurrence; (0, 0) if none."""
        tokens, end = self.tokens, len(self.tokens)
        matched = found = 0
        for n in range(self.shortest, min(self.longest, end) + 1):
            position = self._after.get(tuple(tokens[end - n :]))
            if position is None:
                break
            matched, found = n, position
        # An n-gram seen once has no longer entries yet; the text tells how far it agrees.
        while (
            0 < matched < min(self.longest, found)
            and tokens[found - matched - 1] == tokens[end - matched - 1]
        ):
            matched += 1
        return matched, found


class _Request:
    __slots__ = ("index", "length", "luck", "offer")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.luck = Luck()
        self.offer = Offer()
        self.length = 0


class NgramDrafter:
    """Chain from the most recent occurrence of the longest matching suffix within the request's own text."""

    name = "ngram"

    def __init__(self, *, shortest: int = 1, longest: int = 12) -> None:
        if not 1 <= shortest <= longest <= 64:
            raise UsageError(
                f"ngram needs 1 <= min <= max <= 64, got min={shortest}, max={longest}",
                "the defaults are min=1, max=12",
            )
        self.shortest = shortest
        self.longest = longest
        self.calibration = Calibration(_WEIGHTS)
        self._requests: dict[int, _Request] = {}

    def propose(self, context: Context, budget: int) -> Draft:
        request = self._follow(context)
        offer = request.offer = Offer()
        matched, start = request.index.find()
        node, luck = ROOT, request.luck.log_odds
        for depth, token in enumerate(context.tokens[start : start + max(budget, 0)] if matched else ()):
            features = (length_class(matched + depth),)
            chance = self.calibration.chance(features, luck)
            offer.guesses[node] = [(token, chance, features)]
            node = offer.add(node, token, chance)
        return offer.draft(self.name)

    def commit(self, context: Context, outcome: Outcome | None) -> None:  # noqa: ARG002
        self._follow(context)

    def forget(self, context: Context) -> None:
        self._requests.pop(context.request, None)

    def _follow(self, context: Context) -> _Request:
        request = self._requests.get(context.request)
        if request is None:
            index = NgramIndex(context.tokens, self.shortest, self.longest)
            request = self._requests[context.request] = _Request(index)
        if request.length != len(context.tokens):
            request.offer.learn(context.tokens[request.length :], self.calibration, request.luck)
            request.offer = Offer()
            request.index.follow()
            request.length = len(context.tokens)
        return request
