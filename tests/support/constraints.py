"""A constraint simple enough to be checked by eye."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core import Mask


class Pattern:
    """The i-th token comes from sets[i % len(sets)]; after `length` tokens only `end` may follow.

    A set of one token is forced.
    """

    def __init__(self, sets: Sequence[Sequence[int]], length: int, end: int, vocab_size: int) -> None:
        self.sets = [tuple(its) for its in sets]
        self.length = length
        self.end = end
        self.vocab_size = vocab_size
        self.count = 0

    @property
    def stopped(self) -> bool:
        return self.count >= self.length

    def allowed(self, count: int) -> tuple[int, ...]:
        return (self.end,) if count >= self.length else self.sets[count % len(self.sets)]

    def mask(self) -> Mask:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[list(self.allowed(self.count))] = 1
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def advance(self, token: int) -> None:
        assert token in self.allowed(self.count), "a forbidden token was committed"
        self.count += 1

    def accepts(self, tokens: Sequence[int]) -> int:
        for i, token in enumerate(tokens):
            if token not in self.allowed(self.count + i) or (i and self.count + i > self.length):
                return i
        return len(tokens)

    def forced(self) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < 8 and len(its := self.allowed(self.count + len(tokens))) == 1:
            tokens.append(its[0])
            if its[0] == self.end:
                break
        return tokens

    def fresh(self) -> Pattern:
        return Pattern(self.sets, self.length, self.end, self.vocab_size)
