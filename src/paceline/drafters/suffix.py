"""Suffix decoding: what followed when this request, or an earlier response, said the same thing?

Source: suffix decoding (arXiv 2411.04975) for the two histories and the best-first tree; prediction by
partial matching (Cleary and Witten 1984) for how contexts of several lengths share the probability: the
surest guess speaks first, and each further one gets its part of what those before it leave over.
"""

from __future__ import annotations

from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from paceline.core import ROOT, Context, Draft, Outcome
from paceline.drafters.calibration import Calibration, Features, Luck, length_class
from paceline.drafters.history import ContextTree
from paceline.drafters.store import ResponseStore

REACH = 32
"""Matches are measured up to this many tokens."""

WIDTH = 3
"""Most guesses at one place of the tree."""

LEAST = 0.01
"""The n-th node must be reached and right with at least n times this chance: no row is for free."""

_SURE = 12
"""A single earlier occurrence that matches this far speaks alone."""

# Layout of the features. Evidence: seen once, twice or more and never anything else (DETERMINED); or one
# of several, seen 1, 2, 3-5 or more times, in the longest known context (COUNTED) or in a shorter one
# after what the longer ones say was set aside (LEFT_OVER).
_OWN, _SHARED, _BOTH = 0, 1, 2
_RANK = 3
_LENGTH = _RANK + WIDTH
_DETERMINED = _LENGTH + 10
_COUNTED = _DETERMINED + 3
_LEFT_OVER = _COUNTED + 4
_WEIGHTS = (
    *(-0.4, -0.9, 0.1),
    *(0.3, -0.4, -0.7),
    *(0.0, -0.7, -0.3, 0.0, 0.2, 0.3, 0.5, 0.8, 1.6, 2.4),
    *(0.2, 0.9, 1.4),
    *(-0.8, -0.3, 0.0, 0.3),
    *(-1.3, -0.9, -0.6, -0.3),
)

_Guess = tuple[int, float, float, Features]
"""(token, chance among its siblings, chance once those before it have failed, features)"""


class _Request:
    """One request's history and its last offer: `guesses[node]` at each place, `nodes` for those emitted."""

    __slots__ = ("guesses", "length", "luck", "nodes", "tree")

    def __init__(self, tokens: list[int]) -> None:
        self.tree = ContextTree(tokens)
        self.luck = Luck()
        self.length = 0
        self.guesses: dict[int, list[_Guess]] = {}
        self.nodes: dict[tuple[int, int], int] = {}


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
        request.guesses = guesses = {}
        request.nodes = nodes = {}
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        # (minus path chance, serial, parent, chance, token, text before it)
        queue: list[tuple[float, int, int, float, int, list[int]]] = []
        node, path, text = ROOT, 1.0, context.tokens[-REACH:]
        while len(tokens) < budget:
            guesses[node] = found = self._guess(request, text)
            least = LEAST * (1 + len(tokens))
            for token, chance, _, _ in found:
                if path * chance >= least:
                    heappush(queue, (-path * chance, len(queue) + len(tokens), node, chance, token, text))
            if not queue or -queue[0][0] < least:
                break
            path, _, parent, chance, token, text = heappop(queue)
            path, node, text = -path, len(tokens), [*text, token]
            nodes[parent, token] = node
            tokens.append(token)
            parents.append(parent)
            chances.append(chance)
        n = len(tokens)
        if n == 0:
            return Draft.empty()
        return Draft(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(chances, np.float32),
            (self.name,) * n,
            np.zeros(n, np.int32),
        )

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
            self._learn(request, context.tokens)
            request.tree.follow()
            request.length = len(context.tokens)
        return request

    def _learn(self, request: _Request, tokens: list[int]) -> None:
        node = ROOT
        for token in tokens[request.length :]:
            for guess, _, chance, features in request.guesses.get(node, ()):
                hit = guess == token
                request.luck.record(chance, hit)
                self.calibration.record(features, chance, hit)
                if hit:
                    break
            if (node := request.nodes.get((node, token), ROOT)) == ROOT:
                break
        request.guesses, request.nodes = {}, {}

    def _guess(self, request: _Request, text: list[int]) -> list[_Guess]:
        """The guesses for the token after `text`, surest first."""
        weights = self.calibration.weights
        own = _known(request.tree, text)
        if own and own[0][1] >= _SURE and own[0][2] < _COUNTED:
            ranked = [(0.0, own[0][0], (_OWN, _LENGTH + length_class(own[0][1]), own[0][2]))]
        else:
            found = {token: (_OWN, length, evidence) for token, length, evidence in own}
            for token, length, evidence in _known(self.store.tree, text):
                if mine := found.get(token):
                    better = mine if mine[1] >= length else (_BOTH, length, evidence)
                    found[token] = (_BOTH, better[1], better[2])
                else:
                    found[token] = (_SHARED, length, evidence)
            ranked = []
            for token, (source, length, evidence) in found.items():
                order = _LENGTH + length_class(length)
                sureness = weights[source] + weights[order] + weights[evidence]
                ranked.append((-sureness, token, (source, order, evidence)))
            ranked.sort()
        left, luck = 1.0, request.luck.log_odds
        guesses: list[_Guess] = []
        for rank, (_, token, known) in enumerate(ranked[:WIDTH]):
            features = (*known, _RANK + rank)
            chance = self.calibration.chance(features, luck)
            guesses.append((token, left * chance, chance, features))
            left -= left * chance
        return guesses


def _known(tree: ContextTree, text: list[int]) -> list[tuple[int, int, int]]:
    """What followed `text` in the tree: at most about WIDTH of (token, match length, evidence feature)."""
    contexts, leaf = tree.contexts(text)
    found: list[tuple[int, int, int]] = []
    seen: list[int] = []
    if leaf >= 0:
        older = tree.older[leaf]
        times = 0 if older < 0 else 1 if tree.older[older] < 0 else 2
        token = tree.tokens[leaf]
        found.append((token, tree.matched(text, leaf, REACH), _DETERMINED + times))
        seen.append(token)
    length = len(contexts)
    for node in reversed(contexts):
        if len(found) >= WIDTH:
            break
        counts = node.counts
        left = node.total
        for token in seen:
            left -= counts.get(token, 0)
        if left:
            base = _COUNTED if left == node.total else _LEFT_OVER
            for token in node.top:
                if token not in seen:
                    times = counts[token]
                    found.append((token, length, base + (times - 1 if times < 3 else 2 if times < 6 else 3)))
                    seen.append(token)
        length -= 1
    return found
