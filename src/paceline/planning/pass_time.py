"""What a pass of the target costs, by number of rows: measured at load, corrected while running."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from paceline.core import ROOT, Ids, Rows, Target

LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Row counts that are measured; the ones between are interpolated."""


class PassTime:
    """Seconds of one pass for any number of rows: non-decreasing, linear between measured points.

    A shared machine is noisy, so what is observed while running moves the table by small bounded steps:
    every observation pulls the estimate of its row count, and a common factor for all of them, up or
    down a little, as a running median does; one slow pass changes nothing.

    Args:
        table: rows -> seconds; at least one entry, row counts ascending.
    """

    STEP = 0.02
    SHAPE_LIMIT = 2.0

    def __init__(self, table: Mapping[int, float]) -> None:
        assert table, "a pass-time table needs at least one entry"
        self.rows = sorted(table)
        self.measured = np.maximum.accumulate([table[r] for r in self.rows])
        self._shape = np.ones(len(self.rows))
        self._drift = 1.0
        self._costs: list[float] = []
        self._stale = True

    @classmethod
    def measure(
        cls,
        target: Target,
        *,
        seconds: float = 0.8,
        max_rows: int = 64,
        clock: Callable[[], float] = time.perf_counter,
    ) -> PassTime:
        """Time passes of the target on scratch rows; call before any page holds text.

        Visits the row counts in turn, so that a slow spell hits all of them alike, and keeps each one's
        lower quartile. Stops near the time limit: larger row counts are left out (and extrapolated)
        rather than measured once.
        """
        limit = min(max_rows, target.max_rows, target.context_limit, target.pages * target.page_size)
        ladder = [r for r in LADDER if r <= limit]
        samples: dict[int, list[float]] = {r: [] for r in ladder}
        target.forward(_scratch(target, ladder[0]))  # the first pass pays for cold caches and page faults
        begun = clock()
        while any(len(s) < 7 for s in samples.values()):
            for r in ladder:
                rows = _scratch(target, r)
                start = clock()
                target.forward(rows)
                samples[r].append(clock() - start)
                if clock() - begun > seconds and (r >= 8 or r == ladder[-1]) and len(samples[r]) > 1:
                    break
            if clock() - begun > seconds:
                break
        return cls({r: float(np.quantile(s, 0.25)) for r, s in samples.items() if s})

    @classmethod
    def flat(cls, seconds: float = 1.0) -> PassTime:
        """A table in which rows cost nothing extra, for tests and for tools that only count passes."""
        return cls({1: seconds, 64: seconds})

    def cost(self, rows: int) -> float:
        """Expected seconds of a pass over `rows` rows."""
        if self._stale:
            self._refresh()
        costs = self._costs
        if rows < len(costs):
            return costs[rows]
        if len(costs) < 3:
            return costs[-1] * rows / (len(costs) - 1)
        # Past the table the last measured slope goes on.
        return costs[-1] + (rows - len(costs) + 1) * (costs[-1] - costs[-2])

    def costs(self, rows: int) -> list[float]:
        """[rows + 1] seconds by row count, index 0 unused."""
        if self._stale:
            self._refresh()
        known = self._costs[: rows + 1]
        return known + [self.cost(r) for r in range(len(known), rows + 1)]

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a pass that took `seconds`."""
        if seconds <= 0.0:
            return
        ratio = seconds / self.cost(rows)
        step = self.STEP * float(np.clip(np.log(ratio) / self.STEP, -1.0, 1.0))
        self._drift *= 1.0 + 0.5 * step
        if rows <= self.rows[-1]:
            near = int(np.argmin(np.abs(np.asarray(self.rows) - rows)))
            shape = self._shape[near] * (1.0 + 0.5 * step)
            self._shape[near] = np.clip(shape, 1.0 / self.SHAPE_LIMIT, self.SHAPE_LIMIT)
        self._stale = True

    def _refresh(self) -> None:
        points = np.maximum.accumulate(self.measured * self._shape) * self._drift
        costs = np.interp(np.arange(self.rows[-1] + 1), self.rows, points)
        self._costs = costs.tolist()
        self._stale = False


def _scratch(target: Target, count: int) -> Rows:
    """`count` rows of one throw-away sequence on the first pages."""
    pages = -(-count // target.page_size)
    positions = np.arange(count, dtype=np.int32)
    zeros: Ids = np.zeros(count, np.int32)
    return Rows(
        tokens=zeros,
        positions=positions,
        slots=positions.copy(),
        parents=np.full(count, ROOT, np.int32),
        sequences=zeros.copy(),
        tables=np.arange(pages, dtype=np.int32)[None, :],
        wanted=positions.copy(),
        logits=False,
    )
