"""What draft rows cost in the pass to come, and how many of them to take."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from paceline.planning.pass_time import PassTime

MARGIN = 1.005
"""A draft must promise this much over plain decoding: what the estimates cannot tell apart is not bought."""


def best_prefix(paths: Sequence[float], extra: Sequence[float], plain: float, tokens: float) -> int:
    """How many of the nodes, likeliest first, to buy.

    Args:
        paths: [n] path chances, descending.
        extra: [n + 1] seconds that 0, 1, ... nodes add to the pass.
        plain: seconds of a pass without drafts.
        tokens: that such a pass commits.
    """
    best, count = MARGIN * tokens / plain, 0
    for n, path in enumerate(paths, 1):
        tokens += path
        rate = tokens / (plain + extra[n])
        if rate > best:
            best, count = rate, n
    return count


class RowPrices:
    """What draft rows cost in the pass to come.

    Attributes:
        plain: seconds of a pass that only decodes, without drafts.
        decoding: tokens it commits, one per request.
        token: seconds that a token takes then.
        extra: [n + 1] seconds that 0, 1, ... draft rows add.
    """

    def __init__(self, pass_time: PassTime, decoding: int, base_rows: int) -> None:
        self.plain = pass_time.cost(decoding)
        self.decoding = decoding
        self.token = self.plain / decoding
        self.extra = [0.0]
        self._pass_time = pass_time
        self._base_rows = base_rows
        self._base = pass_time.cost(base_rows)

    def reach(self, rows: int) -> None:
        """Make `extra` cover so many draft rows."""
        first = self._base_rows + len(self.extra)
        self.extra += [cost - self._base for cost in self._pass_time.costs(first, self._base_rows + rows)]

    def behind(self, rows: int) -> RowPrices:
        """What rows cost behind so many that others get."""
        if not rows:
            return self
        later = copy(self)
        later.extra = [cost - self.extra[rows] for cost in self.extra[rows:]]
        return later

    def buy(self, paths: Sequence[float]) -> int:
        """How many of these nodes to take."""
        self.reach(len(paths))
        return best_prefix(paths, self.extra, self.plain, self.decoding)
