"""The suffix drafter's search written in Python, plainly: what the native one must find."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp

from paceline.core import ROOT
from paceline.drafters.calibration import LENGTH_CLASSES, length_class
from paceline.drafters.offer import Guess
from support.context_tree import ContextTree

REACH = 32
WIDTH = 3
LEAST = 0.01
SURE = 8

OWN, SHARED, BOTH = 0, 1, 2
RANK = 3
LENGTH = RANK + WIDTH
DETERMINED = LENGTH + LENGTH_CLASSES
COUNTED = DETERMINED + 3
LEFT_OVER = COUNTED + 4

_Trail = tuple[int, int] | None


@dataclass
class Found:
    """An offer: nodes, parents first, and the guesses at every place that was looked at."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    guesses: dict[int, list[Guess]] = field(default_factory=dict)


def search(own: ContextTree, shared: ContextTree, budget: int, weights: list[float], luck: float) -> Found:
    found = Found()
    queue: list[tuple[float, int, int, float, int, list[int], _Trail]] = []
    node, path, text = ROOT, 1.0, own.tokens[-REACH:]
    trail: _Trail = None
    serial = 0
    for size in range(budget):
        guesses, trail = _guess(own, shared, weights, luck, text, trail)
        found.guesses[node] = guesses
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
        node = len(found.tokens)
        found.tokens.append(token)
        found.parents.append(parent)
        found.chances.append(chance)
    return found


def _guess(
    own: ContextTree,
    shared: ContextTree,
    weights: list[float],
    luck: float,
    text: list[int],
    trail: _Trail,
) -> tuple[list[Guess], _Trail]:
    if trail is None:
        mine, leaf, length = known(own, text)
        if length >= SURE and own.older[leaf] < 0:
            trail = leaf, length
    if trail is not None:
        position, length = trail
        features = (OWN, LENGTH + length_class(length), DETERMINED, RANK)
        chance = _logistic(_sum(luck, *(weights[f] for f in features)))
        onward = (position + 1, length + 1) if position + 1 < len(own.tokens) else None
        return [(own.tokens[position], chance, features)], onward
    said = {token: (OWN, order, evidence) for token, order, evidence in mine}
    for token, order, evidence in known(shared, text)[0]:
        if token not in said:
            said[token] = (SHARED, order, evidence)
        else:
            said[token] = (BOTH, *max(said[token][1:], (order, evidence), key=lambda clue: clue[0]))
    ranked = sorted(
        ((_sum(*(weights[f] for f in fs)), token, fs) for token, fs in said.items()), reverse=True
    )
    return [
        (token, 1.0 / (1.0 + exp(-sureness - weights[RANK + rank] - luck)), (*features, RANK + rank))
        for rank, (sureness, token, features) in enumerate(ranked[:WIDTH])
    ], None


def _logistic(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-log_odds))


def _sum(first: float, *terms: float) -> float:
    """From the left: `sum` compensates for rounding."""
    for term in terms:
        first += term
    return first


def known(tree: ContextTree, text: list[int]) -> tuple[list[tuple[int, int, int]], int, int]:
    """What followed `text`: (token, length feature, evidence feature), the leaf, the length matched there."""
    contexts, leaf = tree.contexts(text)
    found: list[tuple[int, int, int]] = []
    matched = 0
    if leaf >= 0:
        older = tree.older[leaf]
        times = 0 if older < 0 else 1 if tree.older[older] < 0 else 2
        matched = tree.matched(text, leaf, REACH)
        found.append((tree.tokens[leaf], LENGTH + length_class(matched), DETERMINED + times))
    for length in range(len(contexts), 0, -1):
        node, seen = contexts[length - 1], [token for token, _, _ in found]
        left = node.total - sum(node.counts.get(token, 0) for token in seen)
        if len(found) >= WIDTH or not left:
            continue
        base = COUNTED if left == node.total else LEFT_OVER
        for token in node.top:
            if token not in seen:
                times = node.counts[token]
                strength = times - 1 if times < 3 else 2 if times < 6 else 3
                found.append((token, LENGTH + length_class(length), base + strength))
    return found, leaf, matched
