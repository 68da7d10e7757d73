"""Drafters whose guesses are known beforehand: always right, always wrong, random, or right at given rates.

They implement `core.Drafter`. `next_token` is the true continuation: a function from token history to the
token that the target will write next, for example the greedy rule of a stub target, or `following(texts)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.core import ROOT, Context, Draft, Outcome

NextToken = Callable[[list[int]], int | None]


def following(*texts: Sequence[int]) -> NextToken:
    """Return the rule that continues whichever of `texts` the history is a prefix of; None past its end."""

    def next_token(history: list[int]) -> int | None:
        for text in texts:
            if len(text) > len(history) and list(text[: len(history)]) == history:
                return int(text[len(history)])
        return None

    return next_token


class KnownDrafter:
    """Base: remembers what it was told, so that a test can look at it."""

    name = "known"

    def __init__(self, *, chance: float = 0.9) -> None:
        self.chance = chance
        self.outcomes: list[Outcome | None] = []
        self.asked = 0
        self.forgotten: list[int] = []

    def propose(self, context: Context, budget: int) -> Draft:
        self.asked += 1
        return self.draft(context, budget) if budget > 0 else Draft.empty()

    def draft(self, context: Context, budget: int) -> Draft:
        raise NotImplementedError

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        self.outcomes.append(outcome)

    def forget(self, context: Context) -> None:
        self.forgotten.append(context.request)

    def chain(self, tokens: Sequence[int]) -> Draft:
        return Draft.chain(tokens, [self.chance] * len(tokens), self.name)


def continuation(context: Context, next_token: NextToken, length: int) -> list[int]:
    history = list(context.tokens)
    start = len(history)
    while len(history) < start + length and (token := next_token(history)) is not None:
        history.append(token)
    return history[start:]


class Oracle(KnownDrafter):
    """Always right."""

    name = "oracle"

    def __init__(self, next_token: NextToken, *, length: int = 16, chance: float = 0.99) -> None:
        super().__init__(chance=chance)
        self.next_token = next_token
        self.length = length

    def draft(self, context: Context, budget: int) -> Draft:
        return self.chain(continuation(context, self.next_token, min(budget, self.length)))


class Adversary(Oracle):
    """Always wrong, and sure of itself: each guess is the true token plus one."""

    name = "adversary"

    def __init__(
        self, next_token: NextToken, vocab_size: int, *, length: int = 16, chance: float = 0.99
    ) -> None:
        super().__init__(next_token, length=length, chance=chance)
        self.vocab_size = vocab_size

    def draft(self, context: Context, budget: int) -> Draft:
        true = continuation(context, self.next_token, min(budget, self.length))
        return self.chain([(token + 1) % self.vocab_size for token in true])


class RandomChain(KnownDrafter):
    """Guesses uniformly, a chain of random length up to the budget."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0, *, chance: float = 0.9) -> None:
        super().__init__(chance=chance)
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(seed)

    def draft(self, context: Context, budget: int) -> Draft:
        length = int(self.rng.integers(0, budget + 1))
        return self.chain(self.rng.integers(0, self.vocab_size, length).tolist())


class RandomTree(KnownDrafter):
    """A tree of random shape; when `next_token` is given, about `truth` of the nodes are true guesses."""

    name = "random-tree"

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        *,
        next_token: NextToken | None = None,
        truth: float = 0.5,
        chance: float = 0.9,
    ) -> None:
        super().__init__(chance=chance)
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(seed)
        self.next_token = next_token
        self.truth = truth

    def draft(self, context: Context, budget: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        histories: list[list[int]] = []
        taken: set[tuple[int, int]] = set()
        for _ in range(int(self.rng.integers(0, budget + 1))):
            parent = int(self.rng.integers(-1, len(tokens)))
            history = context.tokens if parent == ROOT else histories[parent]
            token = self._guess(history)
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                histories.append([*history, token])
        n = len(tokens)
        return Draft(tokens, parents, [self.chance] * n, (self.name,) * n)

    def _guess(self, history: list[int]) -> int:
        if self.next_token is not None and self.rng.random() < self.truth:
            token = self.next_token(list(history))
            if token is not None:
                return token
        return int(self.rng.integers(0, self.vocab_size))


class SyntheticAcceptance(KnownDrafter):
    """Right at depth i with probability `chances[i]`, given that all before it were right; says so."""

    name = "synthetic"

    def __init__(
        self, next_token: NextToken, chances: Sequence[float], vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.next_token = next_token
        self.chances = tuple(chances)
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(seed)

    def draft(self, context: Context, budget: int) -> Draft:
        true = continuation(context, self.next_token, min(budget, len(self.chances)))
        tokens = [
            token if self.rng.random() < chance else (token + 1) % self.vocab_size
            for token, chance in zip(true, self.chances, strict=False)
        ]
        return Draft.chain(tokens, self.chances[: len(tokens)], self.name)
