"""Suffix decoding: what followed when this request, or an earlier response, said the same thing?

Source: suffix decoding (arXiv 2411.04975) for the two histories and the best-first tree; prediction by
partial matching (Cleary and Witten 1984) for how contexts of several lengths share the probability: the
surest guess speaks first, and each further one gets its part of what those before it leave over.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp
from pathlib import Path

from paceline.core import ROOT, Context, Draft, Outcome
from paceline.drafters.calibration import LENGTH_CLASSES, Calibration, Luck, length_class
from paceline.drafters.history import ContextTree
from paceline.drafters.offer import Guess, Offer
from paceline.drafters.store import ResponseStore

REACH = 32
"""Matches are measured up to this many tokens."""

WIDTH = 3
"""Most guesses at one place of the tree."""

LEAST = 0.01
"""The n-th node must be reached and right with at least n times this chance: no row is for free."""

_SURE = 8
"""A single earlier occurrence in the request itself that matches this far speaks alone."""

# Layout of the features. Evidence: seen once, twice or more and never anything else (DETERMINED); or one
# of several, seen 1, 2, 3-5 or more times, in the longest known context (COUNTED) or in a shorter one
# after what the longer ones say was set aside (LEFT_OVER).
_OWN, _SHARED, _BOTH = 0, 1, 2
_RANK = 3
_LENGTH = _RANK + WIDTH
_DETERMINED = _LENGTH + LENGTH_CLASSES
_COUNTED = _DETERMINED + 3
_LEFT_OVER = _COUNTED + 4
_WEIGHTS = (
    *(-0.1, -1.0, 0.2),
    *(0.3, 0.1, -0.2),
    *(0.0, -1.0, -0.2, 0.0, 0.3, 0.4, 0.6, 1.0, 1.5, 2.5),
    *(0.4, 1.0, 2.0),
    *(-0.8, -0.6, 0.0, 0.1),
    *(-0.8, -0.6, -0.6, -0.5),
)

_Trail = tuple[int, int] | None
"""(position, match length) where the text goes on that is being copied; None when it is not that plain"""

_Candidate = tuple[float, int, int, float, int, list[int], _Trail]
"""(minus path chance, serial, parent, chance, token, text before it, trail)"""


class _Request:
    __slots__ = ("length", "luck", "offer", "tree")

    def __init__(self, tokens: list[int]) -> None:
        self.tree = ContextTree(tokens)
        self.luck = Luck()
        self.offer = Offer()
        self.length = 0


class SuffixDrafter:
    """Tree of the likeliest continuations seen in this request or in earlier responses.

    Args:
        max_tokens: bound on the shared history of responses; 0 keeps none, so that requests share nothing.
        file: where the shared history survives a restart; None keeps it in memory.
        vocab_size, identity: of the model; a file of another is refused.
    """

    name = "suffix"

    def __init__(
        self, *, vocab_size: int, identity: str, max_tokens: int = 100_000, file: str | Path | None = None
    ) -> None:
        self.calibration = Calibration(_WEIGHTS)
        self.store = ResponseStore(max_tokens, vocab_size=vocab_size, identity=identity, file=file)
        self._requests: dict[int, _Request] = {}

    def propose(self, context: Context, budget: int) -> Draft:
        request = self._follow(context)
        offer = request.offer = Offer()
        queue: list[_Candidate] = []
        node, path, text = ROOT, 1.0, context.tokens[-REACH:]
        trail: _Trail = None
        serial = 0
        for size in range(budget):
            guesses, trail = self._copy(request, trail) if trail else self._guess(request, text)
            offer.guesses[node] = guesses
            least = LEAST * (size + 1)
            left = path
            for token, chance, _ in guesses:
                reached = left * chance
                left -= reached
                if reached >= least:
                    serial += 1
                    heappush(queue, (-reached, serial, node, reached / path, token, text, trail))
            if not queue or -queue[0][0] < least:
                break
            path, _, parent, chance, token, text, trail = heappop(queue)
            path, text = -path, [*text, token]
            node = offer.add(parent, token, chance)
        return offer.draft(self.name)

    def commit(self, context: Context, outcome: Outcome | None) -> None:  # noqa: ARG002
        self._follow(context)

    def forget(self, context: Context) -> None:
        if self._requests.pop(context.request, None) is not None:
            self.store.add(context.tokens[context.prompt_length :])

    def close(self) -> None:
        """Write the shared history to its file, if it has one."""
        self.store.save()

    def _follow(self, context: Context) -> _Request:
        request = self._requests.get(context.request)
        if request is None:
            request = self._requests[context.request] = _Request(context.tokens)
        if request.length != len(context.tokens):
            request.offer.learn(context.tokens[request.length :], self.calibration, request.luck)
            request.offer = Offer()
            request.tree.follow()
            request.length = len(context.tokens)
        return request

    def _guess(self, request: _Request, text: list[int]) -> tuple[list[Guess], _Trail]:
        """The guesses for the token after `text`, surest first."""
        weights = self.calibration.weights
        tree = request.tree
        own, leaf, length = _known(tree, text)
        if length >= _SURE and tree.older[leaf] < 0:
            return self._copy(request, (leaf, length))
        found = {guess[0]: (_OWN, guess[1], guess[2]) for guess in own}
        for token, order, evidence in _known(self.store.tree, text)[0]:
            mine = found.get(token)
            if mine is None:
                found[token] = (_SHARED, order, evidence)
            elif mine[1] >= order:
                found[token] = (_BOTH, mine[1], mine[2])
            else:
                found[token] = (_BOTH, order, evidence)
        ranked = [(weights[f[0]] + weights[f[1]] + weights[f[2]], token, f) for token, f in found.items()]
        ranked.sort(reverse=True)
        luck, rank = request.luck.log_odds, _RANK
        guesses: list[Guess] = []
        for sureness, token, features in ranked[:WIDTH]:
            chance = 1.0 / (1.0 + exp(-sureness - weights[rank] - luck))
            guesses.append((token, chance, (*features, rank)))
            rank += 1
        return guesses, None

    def _copy(self, request: _Request, trail: tuple[int, int]) -> tuple[list[Guess], _Trail]:
        """What stands on the trail: the only place where so long a match occurred, so nothing competes."""
        position, length = trail
        tokens = request.tree.tokens
        features = (_OWN, _LENGTH + length_class(length), _DETERMINED, _RANK)
        guess = (tokens[position], self.calibration.chance(features, request.luck.log_odds), features)
        return [guess], (position + 1, length + 1) if position + 1 < len(tokens) else None


def _known(tree: ContextTree, text: list[int]) -> tuple[list[tuple[int, int, int]], int, int]:
    """What followed `text` in the tree.

    Returns:
        (guesses, leaf, length): at most about WIDTH of (token, length feature, evidence feature), longest
        context first; the newest position of the leaf the text ends in, or -1; the length matched there.
    """
    contexts, leaf = tree.contexts(text)
    found: list[tuple[int, int, int]] = []
    seen: list[int] = []
    matched = 0
    if leaf >= 0:
        older = tree.older[leaf]
        times = 0 if older < 0 else 1 if tree.older[older] < 0 else 2
        token = tree.tokens[leaf]
        matched = tree.matched(text, leaf, REACH)
        found.append((token, _LENGTH + length_class(matched), _DETERMINED + times))
        seen.append(token)
    length = len(contexts)
    while length and len(found) < WIDTH:
        node = contexts[length - 1]
        counts = node.counts
        left = node.total
        for token in seen:
            if token in counts:
                left -= counts[token]
        if left:
            base = _COUNTED if left == node.total else _LEFT_OVER
            order = _LENGTH + length_class(length)
            for token in node.top:
                if token not in seen:
                    times = counts[token]
                    found.append((token, order, base + (times - 1 if times < 3 else 2 if times < 6 else 3)))
                    seen.append(token)
        length -= 1
    return found, leaf, matched
