"""Where a head's rows lie, and whose they are."""

from __future__ import annotations

import numpy as np

from paceline.core import Context
from paceline.drafters.head_cache import HeadCache, Track


class Pages:
    pages, page_size, context_limit = 32, 4, 100
    window = None

    def copy_page(self, source: int, target: int) -> None:
        """Nothing lies in them."""


def test_rows_behind_one_gap_are_not_found_behind_another() -> None:
    """The text repeats itself, so its tokens alone would fit."""
    cache = HeadCache(Pages())
    context = Context(1, [5] * 40, 40)
    first = Track(1)
    first.waiting.add(10, np.zeros((29, 1), np.float32))
    assert cache.open(first, context.tokens, 1)
    assert (first.base, first.done) == (10, 10)
    first.filed = 29
    context.tokens.append(5)
    first.waiting.add(39, np.zeros((1, 1), np.float32))
    cache.settle(first, context.tokens)
    assert first.done == 39
    cache.release(first)

    later = Track(1)
    later.waiting.add(25, np.zeros((15, 1), np.float32))
    assert cache.open(later, context.tokens, 1)
    assert (later.base, later.done, later.waiting.first) == (25, 25, 25)
    cache.release(later)

    same = Track(1)
    same.waiting.add(10, np.zeros((30, 1), np.float32))
    assert cache.open(same, context.tokens, 1)
    assert same.base == 10
    assert same.done == same.waiting.first > 10
