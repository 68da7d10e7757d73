"""Whoever holds pages of a drafter's cache; when it is full, the one that was idle longest gives way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from paceline.models.kv import KVCache, KVSequence


class Tenant(Protocol):
    """One request's place in the cache.

    Attributes:
        sequence: its pages; None before the first pass and after an eviction.
    """

    sequence: KVSequence | None

    def vacate(self) -> None:
        """Forget what lay in the pages; they are gone."""
        ...


T = TypeVar("T", bound=Tenant)


class Tenants(Generic[T]):
    """Those that hold pages of one cache."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        self._holding: dict[T, None] = {}  # least recently used first

    def missing(self, track: T, ids: Sequence[int]) -> int:
        """How many rows of this text are still to be computed; its last one always is."""
        raise NotImplementedError

    def open(self, track: T, ids: Sequence[int], more: int, busy: Sequence[T] = ()) -> bool:
        """Make room for a text and `more` slots behind it; idle tracks give way, the longest idle first.

        Returns:
            False, and nothing is taken that others need, if it does not fit beside the `busy` ones.
        """
        raise NotImplementedError

    def reserve(self, track: T, rows: int, busy: Sequence[T], *, loose: int = 0) -> bool:
        """Reserve slots behind a sequence, at the cost of those that are not `busy`.

        Returns:
            False if it does not fit beside the busy ones; the track then holds nothing.
        """
        assert track.sequence is not None
        self._holding.pop(track, None)
        self._holding[track] = None
        while not self.kv.reserve(track.sequence, rows, loose):
            idle = next((t for t in self._holding if t is not track and t not in busy), None)
            self.release(track if idle is None else idle)
            if idle is None:
                return False
        return True

    def release(self, track: T) -> None:
        """Give the track's pages back; committed ones stay cached until their memory is needed."""
        if track.sequence is not None:
            self.kv.free(track.sequence)
        track.vacate()
        self._holding.pop(track, None)

    def clear(self) -> None:
        """Forget everything, also after something was interrupted half-way."""
        for track in self._holding:
            track.vacate()
        self._holding.clear()
        self.kv.clear()
