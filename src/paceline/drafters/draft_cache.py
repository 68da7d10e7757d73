"""A draft model and its KV cache, shared by many requests: what was drafted stays where it proved right.

Each request has a track: committed tokens, whose pages may be shared with other requests, and behind them
a tail of drafted tokens whose KV is in place too. When the text has moved on, the part of the tail that it
agrees with is kept and the rest overwritten; nothing is ever computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core import ROOT, Floats, Ids, Rows, Target
from paceline.drafters.tenants import Tenants
from paceline.models.kv import KVCache, KVSequence, tables


class Track:
    """One request's place in the cache.

    Attributes:
        sequence: committed tokens and pages; None before the first pass and after an eviction.
        tail: tokens whose KV lies in the slots behind the committed ones.
    """

    __slots__ = ("sequence", "tail")

    def __init__(self) -> None:
        self.sequence: KVSequence | None = None
        self.tail: list[int] = []

    def __len__(self) -> int:
        """Tokens whose KV is in place."""
        return len(self.tail) + (len(self.sequence.tokens) if self.sequence is not None else 0)

    def vacate(self) -> None:
        self.sequence = None
        self.tail.clear()


class DraftCache(Tenants[Track]):
    """Runs passes of a draft model for any number of tracks, and keeps their KV.

    Args:
        model: the draft model; its pages are this cache's alone.
    """

    def __init__(self, model: Target) -> None:
        super().__init__(KVCache.of(model))
        self.model = model
        self._count: Ids = np.arange(max(model.context_limit, model.max_rows), dtype=np.int32)
        self._zeros: Ids = np.zeros(model.max_rows, np.int32)
        self._roots: Ids = np.full(model.max_rows, ROOT, np.int32)

    def settle(self, track: Track, ids: Sequence[int], loose: int) -> None:
        """Follow a text: keep what agrees with `ids`, forget the rest.

        Args:
            ids: the text in the draft's ids; those that are committed must not have changed.
            loose: how many of the last ids may still change: they stay in the tail.
        """
        sequence = track.sequence
        if sequence is None:
            return
        base, agreed = len(sequence), 0
        for own, token in zip(track.tail, ids[base : base + len(track.tail)], strict=False):
            if own != token:
                break
            agreed += 1
        del track.tail[agreed:]
        stable = min(agreed, len(ids) - max(loose, 1) - base)
        # A commit gives back the pages behind it, so a tail that must stay waits for a page to be full.
        if stable >= (self.model.page_size if loose else 1):
            self.kv.commit(sequence, track.tail[:stable])
            track.tail.clear()

    def missing(self, track: Track, ids: Sequence[int]) -> int:
        """How many of `ids`, of which the last is always wanted, are still to be computed."""
        return max(1, len(ids) - len(track))

    def open(self, track: Track, ids: Sequence[int], more: int, busy: Sequence[Track] = ()) -> bool:
        """Make room for `ids` and `more` tokens behind them."""
        if len(ids) + more > self.model.context_limit:
            return False
        if track.sequence is None:
            track.sequence = self.kv.open(ids)
            track.tail.clear()
        # The last token's logits are wanted, so it is computed again if it is there.
        base = len(track.sequence)
        del track.tail[len(ids) - 1 - base :]
        return self.reserve(track, len(ids) + more - base, busy, loose=more)

    def run(self, feeds: Sequence[tuple[Track, Sequence[int]]]) -> list[Floats]:
        """Compute tokens behind what is in place; room must have been made.

        Returns:
            For each feed the [vocab] logits after its last token; valid until the next pass.
        """
        rows = sum(len(feed) for _, feed in feeds)
        if rows <= self.model.max_rows:
            return self._pass(feeds)
        logits: list[Floats] = []
        for track, feed in feeds:
            step = self.model.max_rows
            for start in range(0, len(feed), step):
                last = self._pass([(track, feed[start : start + step])])
            logits.append(last[0].copy())
        return logits

    def _pass(self, feeds: Sequence[tuple[Track, Sequence[int]]]) -> list[Floats]:
        output = self.model.forward(self._single(*feeds[0]) if len(feeds) == 1 else _rows(feeds))
        for track, feed in feeds:
            track.tail.extend(feed)
        assert output.logits is not None
        return list(output.logits)

    def _single(self, track: Track, feed: Sequence[int]) -> Rows:
        """`_rows` of one track, most of it from arrays that are kept: it is asked for once per token."""
        start, count = len(track), len(feed)
        assert track.sequence is not None, "a pass without room made for it"
        places = self._count[start : start + count]
        pages, window_pages = tables([track.sequence])
        return Rows(
            tokens=np.array(feed, np.int32),
            positions=places,
            slots=places,
            parents=self._roots[:count],
            sequences=self._zeros[:count],
            tables=pages,
            wanted=self._count[count - 1 : count],
            logits=True,
            window_tables=window_pages,
        )


def _rows(feeds: Sequence[tuple[Track, Sequence[int]]]) -> Rows:
    counts = [len(feed) for _, feed in feeds]
    sequences = [track.sequence for track, _ in feeds if track.sequence is not None]
    assert len(sequences) == len(feeds), "a pass without room made for it"
    pages, window_pages = tables(sequences)
    ends = np.cumsum(counts, dtype=np.int32)
    places: Ids = np.concatenate(
        [np.arange(len(track), len(track) + len(feed), dtype=np.int32) for track, feed in feeds]
    )
    return Rows(
        tokens=np.fromiter((t for _, feed in feeds for t in feed), np.int32, int(ends[-1])),
        positions=places,
        slots=places.copy(),
        parents=np.full(len(places), ROOT, np.int32),
        sequences=np.repeat(np.arange(len(feeds), dtype=np.int32), counts),
        tables=pages,
        wanted=ends - np.int32(1),
        logits=True,
        window_tables=window_pages,
    )
