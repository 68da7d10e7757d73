"""What drafters that read the target's states have in common: they hear them, and pair them with the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core import Context, Floats
from paceline.drafters.calibration import Luck
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.choice import Subset, request_sampler
from paceline.drafters.head_cache import Follower, HeadCache, Track
from paceline.drafters.head_program import Lender
from paceline.drafters.network import Costs, G, NetworkDrafter, Seat

HeadSeat = Seat[Track]


class Network(Follower, Protocol):
    """The weights that a drafter runs, and the pages of its cache."""

    checkpoint: Checkpoint
    lender: Lender


class StateDrafter(NetworkDrafter[HeadSeat, G]):
    """Base of drafters that read the target's states; implements `core.HearingDrafter`, `core.CostlyDrafter`.

    Args:
        name: of the drafter.
        network: what it runs.
        layers: of the target, whose inputs it reads, in its order.
        ids: [its vocabulary] the target's id of each of its own, None where they are the same.
        ends: the target's end tokens.
        costs: pass times of the network.
        clock: seconds.
    """

    KINDS = 4  # the first or a later choice, or one whose chance was told; each the likeliest or a drawn one
    HOPE_RATE = 0.1
    WORTH = 1
    FEW = 2

    cache: HeadCache

    def __init__(
        self,
        name: str,
        network: Network,
        layers: Sequence[int],
        ids: NDArray[np.int64] | None,
        ends: frozenset[int],
        costs: Costs,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.network = network
        self.layers = tuple(sorted(set(layers)))
        self._order = tuple(layers)
        self._vocab = network.lender.vocab_size
        ids = np.arange(self._vocab) if ids is None else ids
        self._choices = Subset(ids, self._vocab)
        self._target_ids: list[int] = ids.tolist()
        self._ends = ends
        super().__init__(name, f"{name} head", HeadCache(network), costs, clock=clock)

    def describe(self) -> str:
        """One line for people: what was loaded."""
        return self.network.checkpoint.describe()

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        if self.broken is None:
            seat = self._seats.get(context.request) or self._new_seat(context)
            seat.track.waiting.add(start, [hidden[layer] for layer in self._order])

    def price(self, context: Context) -> float:
        seat = self._seats.get(context.request)
        rows = len(context.tokens) if seat is None else self.cache.missing(seat.track, context.tokens)
        return self.costs.cost(rows)

    def forget(self, context: Context) -> None:
        seat = self._seats.get(context.request)
        if seat is not None:
            self.cache.settle(seat.track, context.tokens)
        super().forget(context)

    def _new_seat(self, context: Context) -> HeadSeat:
        sampler = request_sampler(context, self._vocab, self._ends)
        seat = self._seats[context.request] = Seat(sampler, Track(context.request), self._hope, Luck())
        return seat
