"""What a pass of the target costs, by number of rows: measured at load, corrected while running."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.core import ROOT, Ids, Rows, Target

OCTAVES = (1, 2, 4, 8, 16, 32, 64)
"""Row counts that are always measured, as far as the target allows."""

BETWEEN = (3, 5, 6, 10, 12, 24, 48)
"""Row counts that are measured while there is time; the rest is interpolated."""

_MIN_ROUNDS, _MAX_ROUNDS = 2, 6


class PassTime:
    """Seconds of one pass for any number of rows: non-decreasing, linear between measured points.

    A shared machine is noisy, so what is observed while running moves the table as a running median
    moves: a bounded step towards each observation, however far off it is. One factor common to all row
    counts moves quickly (the machine got slower, the context longer), the shape of the curve slowly, and
    it forgets its way back to the measured one; one slow pass, or ten, changes no decision.

    Past the table its last octave goes on. Rows of prompts cost more the further back they look; how much
    is learnt from passes with such rows, which teach nothing else.

    Args:
        table: row count -> seconds; at least one entry.
    """

    DRIFT_STEP = 0.03
    SHAPE_STEP = 0.01
    SHAPE_MEMORY = 0.999
    LOOK_STEP = 0.1
    _REFRESH_EVERY = 4
    _REACH = 64  # as far as observations correct the shape
    _SHORT = 64  # positions at which looking back costs next to nothing

    def __init__(self, table: Mapping[int, float]) -> None:
        assert table, "a pass-time table needs at least one entry"
        self._rows = sorted(table)
        self._measured = [table[r] for r in self._rows]
        self._entries = len(table)
        self._log_shape = [0.0] * len(self._rows)
        self._drift = 1.0
        self._observed = 0
        self._curve = self._interpolate()
        slope, last = _last_slope(self._curve), self._rows[-1]
        if last < self._REACH:
            self._rows.append(4 * last)
            self._measured.append(self._curve[last] + 3 * last * slope)
            self._log_shape.append(0.0)
            self._curve = self._interpolate()
        self._look = 0.0

    @classmethod
    def measure(
        cls,
        target: Target,
        *,
        max_rows: int = 16,
        seconds: float = 0.4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> PassTime:
        """Time passes of the target on scratch rows; call while no page holds text.

        The octaves are measured twice however slow the target is, everything else until `seconds` are
        over. Row counts are visited in turn, so that a slow spell hits all of them alike, and the fastest
        pass of each counts, since other work on the machine can only make a pass slower.
        """
        limit = min(max_rows, target.max_rows, target.context_limit, target.pages * target.page_size)
        octaves = [r for r in OCTAVES if r <= limit]
        rest = [r for r in BETWEEN if r <= limit]
        target.forward(_scratch(target, 1))  # the first pass pays for cold caches and page faults
        begun = clock()
        samples = {r: [_timed(target, r, clock)] for r in octaves}
        for r in octaves * (_MIN_ROUNDS - 1) + (octaves + rest) * (_MAX_ROUNDS - _MIN_ROUNDS):
            times = samples.setdefault(r, [])
            if clock() - begun < seconds or (r in octaves and len(times) < _MIN_ROUNDS):
                times.append(_timed(target, r, clock))
        return cls({r: min(times) for r, times in samples.items() if len(times) >= _MIN_ROUNDS})

    def table(self) -> dict[int, float]:
        """Seconds by measured row count, as measured."""
        return dict(list(zip(self._rows, self._measured, strict=True))[: self._entries])

    def cost(self, rows: int) -> float:
        """Expected seconds of a pass over `rows` rows, at least one."""
        curve = self._curve
        if rows < len(curve):
            return curve[rows] * self._drift
        last = self._rows[-1]
        return (curve[last] + (rows - last) * _last_slope(curve)) * self._drift

    def costs(self, first: int, last: int) -> list[float]:
        """[last - first + 1] seconds of a pass over `first` rows, and so on to `last`."""
        return [self.cost(rows) for rows in range(first, last + 1)]

    def rows_within(self, seconds: float, most: int) -> int:
        """Rows, at most `most`, of the largest pass that takes no longer."""
        return bisect_right(range(1, most + 1), seconds, key=self.cost)

    def weight(self, position: int) -> float:
        """What a prompt's row at this position costs, in rows that need not look back."""
        # Where rows are free one still counts as something, so that the ratio means something.
        row = max(_last_slope(self._curve), 1e-3 * self._curve[1]) * self._drift
        return 1.0 + self._look * position / row

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a pass over `rows` rows that took `seconds`."""
        if rows < 1 or seconds <= 0.0:
            return
        off = math.log(seconds / self.cost(rows))
        self._drift *= math.exp(max(-self.DRIFT_STEP, min(self.DRIFT_STEP, off)))
        if rows <= self._rows[-1]:
            near = bisect_left(self._rows, rows)
            step = max(-self.SHAPE_STEP, min(self.SHAPE_STEP, off))
            self._log_shape[near] = self.SHAPE_MEMORY * self._log_shape[near] + step
        self._observed += 1
        if self._observed % self._REFRESH_EVERY == 0:
            self._curve = self._interpolate()

    def observe_prompts(self, rows: int, looks: int, seconds: float) -> None:
        """Learn from a pass over `rows` rows, some of them a prompt's, which looked back over `looks`
        positions in all."""
        if looks < self._SHORT * rows:
            return
        # No row looks back at more than its own price for each 256 positions: one slow pass proves little.
        most = self.cost(rows) / rows / 256
        seen = min(max((seconds - self.cost(rows)) / looks, 0.0), most)
        self._look += self.LOOK_STEP * (seen - self._look)

    def relax(self) -> None:
        """Trust what was observed a little less: it is a step older, and nothing new was learnt."""
        self._drift **= 0.98

    def _interpolate(self) -> list[float]:
        """[rows] the table with what was observed, never falling, and straight lines in between."""
        curve: list[float] = []
        left, height = 0, 0.0
        for right, measured, log_shape in zip(self._rows, self._measured, self._log_shape, strict=True):
            point = max(measured * math.exp(log_shape), height)
            start = height if curve else point  # nothing is known below the first
            slope = (point - start) / (right - left)
            curve += [start + slope * row for row in range(right - left)]
            left, height = right, point
        return [*curve, height]


def _last_slope(curve: Sequence[float]) -> float:
    """Seconds per row in the last octave; a curve of one row says nothing, so rows are not free."""
    last = len(curve) - 1
    return (curve[last] - curve[last // 2]) / (last - last // 2) if last > 1 else curve[last]


def _timed(target: Target, rows: int, clock: Callable[[], float]) -> float:
    scratch = _scratch(target, rows)
    start = clock()
    target.forward(scratch)
    return clock() - start


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
