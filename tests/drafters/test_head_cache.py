"""Where a head's rows lie, and whose they are."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from paceline.core import Context
from paceline.drafters import head_cache
from paceline.drafters.head_cache import HeadCache, Track, Waiting


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
    first.waiting.add(10, [np.zeros((29, 1), np.float32)])
    assert cache.open(first, context.tokens, 1)
    assert (first.base, first.done) == (10, 10)
    first.filed = 29
    context.tokens.append(5)
    first.waiting.add(39, [np.zeros((1, 1), np.float32)])
    cache.settle(first, context.tokens)
    assert first.done == 39
    cache.release(first)

    later = Track(1)
    later.waiting.add(25, [np.zeros((15, 1), np.float32)])
    assert cache.open(later, context.tokens, 1)
    assert (later.base, later.done, later.waiting.first) == (25, 25, 25)
    cache.release(later)

    same = Track(1)
    same.waiting.add(10, [np.zeros((30, 1), np.float32)])
    assert cache.open(same, context.tokens, 1)
    assert same.base == 10
    assert same.done == same.waiting.first > 10


@pytest.mark.parametrize("held", [0, 100, 4 << 20])
def test_waiting_states_are_those_heard_and_not_dropped(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """In any pieces, heard twice or not: state t of layer l is [t, l]."""
    monkeypatch.setattr(head_cache, "MOST_HELD", held)
    rng = np.random.default_rng(held)
    waiting, first, end = Waiting(), 0, 0
    for _ in range(300):
        start = int(rng.integers(max(0, end - 3), end + 1)) if end > first else end
        count = int(rng.integers(1, 6))
        layers = [np.array([[t, layer] for t in range(start, start + count)], np.float32) for layer in (7, 2)]
        waiting.add(start, layers)
        end = max(end, start + count)
        if rng.random() < 0.2:
            dropped = int(rng.integers(0, end - first + 1))
            waiting.drop(dropped)
            first += dropped
        assert (waiting.first, waiting.end) == (first, end)
        if rng.random() < 0.3:
            assert waiting.all().tolist() == [[t, 7, t, 2] for t in range(first, end)]
    waiting.add(end + 5, [np.array([[9.0]], np.float32)])  # behind a gap
    assert (waiting.first, waiting.end, waiting.all().tolist()) == (end + 5, end + 6, [[9.0]])


def test_waiting_states_keep_few_passes_alive() -> None:
    """One row of each large pass is wanted; whatever else was computed there must not stay in memory."""
    waiting = Waiting()
    passes: list[weakref.ref[np.ndarray]] = []
    for t in range(200):
        whole = np.full((64, 256), t, np.float32)  # 64 KiB
        passes.append(weakref.ref(whole))
        waiting.add(t, [whole[:1, :128], whole[:1, 128:]])
        del whole
        assert sum(one() is not None for one in passes) * (64 << 10) <= head_cache.MOST_HELD
    assert waiting.all()[:, 0].tolist() == list(range(200))
