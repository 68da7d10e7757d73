"""A head's KV cache, shared by many requests, and the target's states that it has not been given yet.

Row t of a text pairs the target's state of token t with token t + 1. It can be computed once both are
there, and stays right for good; what the head computes beyond that, from its own states, is thrown away
after each draft. States that nobody asked for wait until somebody does. What is missing - a prefix that
the target found in its cache, states dropped for their size - leaves a gap, and the head then sees only
the text behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from paceline.core import Floats
from paceline.drafters.tenants import Tenants
from paceline.models.kv import KVCache, KVSequence, Paged

MOST_BYTES = 256 << 20
"""States kept for one request; beyond it the older half is forgotten."""

MOST_HELD = 4 << 20
"""Bytes that states may keep alive before they are joined: all rows of their passes, those of rejected drafts
and of other requests too."""


class Waiting:
    """The target's states of consecutive tokens of one text, as heard until somebody wants them in one piece.

    Attributes:
        first: the token whose state comes first.
    """

    __slots__ = ("_blocks", "_heard", "_held", "_row_bytes", "first", "length")

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, start: int) -> None:
        self.first = start
        self.length = 0
        self._row_bytes = 0
        self._blocks: list[Floats] = []
        self._heard: list[Sequence[Floats]] = []
        self._held = 0

    @property
    def end(self) -> int:
        """The token whose state comes next."""
        return self.first + self.length

    def add(self, start: int, states: Sequence[Floats]) -> None:
        """Take the states of the tokens from `start` on; those that are there already are kept.

        Args:
            states: [n, width] of each layer that is read. Kept as they are: nobody may write to them.
        """
        if start > self.end or not self.length:
            self._begin(start)
            self._row_bytes = 4 * sum(part.shape[1] for part in states)
        known = self.end - start
        fresh = len(states[0]) - known
        if fresh <= 0:
            return
        self._heard.append([part[known:] for part in states] if known else states)
        self._held += sum(part.nbytes if part.base is None else part.base.nbytes for part in states)
        self.length += fresh
        if self.length * self._row_bytes > MOST_BYTES:
            self.drop(self.length // 2)
        elif self._held > MOST_HELD:
            self._join()

    def drop(self, count: int) -> None:
        """Forget the first `count` states."""
        whole = self.all()
        self._blocks = [whole[count:].copy()] if count < self.length else []
        self.first += count
        self.length -= count

    def all(self) -> Floats:
        """[length, width of all layers] all of them."""
        self._join()
        if len(self._blocks) != 1:
            self._blocks = [np.concatenate(self._blocks)] if self._blocks else [np.zeros((0, 0), np.float32)]
        return self._blocks[0]

    def _join(self) -> None:
        """Make one block of what was heard since the last one."""
        if self._heard:
            layers = [np.concatenate(layer) for layer in zip(*self._heard, strict=True)]
            self._blocks.append(np.concatenate(layers, axis=1))
            self._heard, self._held = [], 0


class Track:
    """One request's place in the cache.

    Args:
        request: whose it is.

    Attributes:
        sequence: rows in place for good; None before the first pass and after an eviction.
        base: the row in slot 0; above 0 where the text before it is not known to the head.
        filed: rows behind those of the sequence that are in place too.
    """

    __slots__ = ("base", "filed", "keys", "request", "sequence", "waiting")

    def __init__(self, request: int) -> None:
        self.request = request
        self.sequence: KVSequence | None = None
        self.base = 0
        self.filed = 0
        self.keys: list[int] = []
        self.waiting = Waiting()

    @property
    def done(self) -> int:
        """The first row that is not in place for good."""
        return self.base + (len(self.sequence) if self.sequence is not None else 0)

    def vacate(self) -> None:
        self.sequence = None
        self.filed = 0


class Follower(Paged, Protocol):
    """A network with cache pages, and positions for so many rows of a text."""

    context_limit: int


class HeadCache(Tenants[Track]):
    """Follows texts with a head's KV.

    Args:
        head: whose pages are this cache's alone.
    """

    def __init__(self, head: Follower) -> None:
        super().__init__(KVCache.of(head))
        self.head = head

    def settle(self, track: Track, tokens: Sequence[int]) -> None:
        """Make rows that a pass has filed part of the text, now that it has gone on."""
        rows = len(tokens) - 1
        if track.sequence is not None and track.filed:
            count = min(track.filed, rows - 1 - track.done)  # the last row's logits are wanted again
            self._extend_keys(track, tokens)
            start = len(track.sequence)
            self.kv.commit(track.sequence, track.keys[start : start + count])
            track.waiting.drop(count)
        track.filed = 0

    def keep(self, track: Track, tokens: Sequence[int], count: int) -> None:
        """Make `count` more rows part of the text; they are in place, and depend on no later token."""
        assert track.sequence is not None
        self._extend_keys(track, tokens)
        start = len(track.sequence)
        self.kv.commit(track.sequence, track.keys[start : start + count])

    def ready(self, track: Track, tokens: Sequence[int]) -> bool:
        """Whether the states of all tokens but the last are known, or in place, without a gap at the end."""
        return track.waiting.length > 0 and track.waiting.end >= len(tokens) - 1

    def missing(self, track: Track, tokens: Sequence[int]) -> int:
        """How many rows are still to be computed."""
        rows = len(tokens) - 1
        return max(1, rows - max(track.done if track.sequence is not None else 0, track.waiting.first))

    def open(self, track: Track, tokens: Sequence[int], more: int, busy: Sequence[Track] = ()) -> bool:
        """Make room for the rows of the text and `more` slots behind."""
        rows = len(tokens) - 1
        if rows + more > self.head.context_limit:
            return False
        if track.sequence is not None and track.waiting.first > track.done:
            self.release(track)
        if track.sequence is None:
            self._begin(track, tokens)
        assert track.sequence is not None
        return self.reserve(track, rows - track.done + more, busy, loose=more)

    def _begin(self, track: Track, tokens: Sequence[int]) -> None:
        """Start with the rows that another request has left; without their states, behind the gap."""
        waiting = track.waiting
        track.base, track.keys = 0, []
        self._extend_keys(track, tokens)
        track.sequence = self.kv.open(track.keys)
        if waiting.first <= len(track.sequence):
            waiting.drop(min(len(track.sequence) - waiting.first, waiting.length))
            return
        self.kv.free(track.sequence)
        track.base = waiting.first
        # Rows behind a gap are this request's and gap's own: the same tokens may have other states elsewhere.
        track.keys = [-1 - (track.request << 32) - track.base]
        self._extend_keys(track, tokens)
        track.sequence = self.kv.open(track.keys)
        waiting.drop(min(len(track.sequence), waiting.length))

    def _extend_keys(self, track: Track, tokens: Sequence[int]) -> None:
        """Keys of the rows: a row depends on all tokens up to the one behind it, the first on two."""
        keys, base = track.keys, track.base
        if not keys and len(tokens) > 1:
            keys.append((1 + tokens[0] << 32) + tokens[1])
        keys.extend(tokens[base + len(keys) + 1 :])
