"""What a pass of the target costs on this machine, against what its memory allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.core import ROOT, Ids, Rows, Target
from paceline.errors import RequestError

ROWS = (1, 2, 4, 8, 16, 32)
PREFILL = 512
APART = (1, 8, PREFILL)
"""Passes whose operations are told apart."""

WARM_UP = 1


@dataclass(frozen=True, slots=True)
class PassCost:
    """One kind of pass.

    Attributes:
        rows: rows of the pass.
        outputs: rows whose next token was computed: all of them while checking drafts, one in prefill.
        seconds: median over `passes`; `fastest` the least.
        ratio: seconds over those of a pass of one row.
        bytes: weights and KV cache read at least once.
        bandwidth_share: bytes / seconds over the machine's read bandwidth.
    """

    rows: int
    outputs: int
    passes: int
    seconds: float
    fastest: float
    ratio: float
    bytes: int
    bandwidth_share: float


@dataclass(frozen=True, slots=True)
class OperationCost:
    """All operations of one kind in a pass.

    Attributes:
        seconds: by rows of the pass; medians, timed apart from the passes, since timing costs a little.
    """

    name: str
    seconds: dict[int, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """Attributes:
    read_bandwidth: bytes per second that the same threads read from memory, the best of several tries
        before, between and after the passes.
    context: tokens in the KV cache during each pass.
    operations: the dearest in a pass of one row first; empty unless asked for.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    read_bandwidth: float
    context: int
    passes: list[PassCost]
    operations: list[OperationCost]


def rows_at(target: Target, start: int, count: int, outputs: int) -> Rows:
    """A chain of `count` rows behind `start` tokens, the last `outputs` of them wanted."""
    places: Ids = np.arange(start, start + count, dtype=np.int32)
    pages: Ids = np.arange(-(-(start + count) // target.page_size), dtype=np.int32)[None]
    window = target.window
    return Rows(
        tokens=(places * 7 + 11) % np.int32(target.vocab_size),
        positions=places,
        slots=places.copy(),
        parents=np.full(count, ROOT, np.int32),
        sequences=np.zeros(count, np.int32),
        tables=pages,
        wanted=np.arange(count - outputs, count, dtype=np.int32),
        logits=False,
        # Pages that no row sees any more are written again.
        window_tables=None if window is None else pages % np.int32(window.pages),
    )


def profile(
    target: Target,
    *,
    weight_bytes: int,
    kv_bytes_per_token: int,
    read_bandwidth: Callable[[], float],
    context: int = 128,
    budget_s: float = 2.0,
    op_times: Callable[[Rows], dict[str, float]] | None = None,
) -> Profile:
    """Time passes of 1 to 32 rows and a prefill, each for about `budget_s` seconds.

    Kinds of passes take turns, so that a machine that drifts does so for all. Overwrites the target's KV.

    Args:
        op_times: runs a pass and returns the seconds of each kind of operation; given, these are told apart.

    Raises:
        RequestError: the context and the largest pass do not fit the model's limit.
    """
    kinds = [(n, n) for n in ROWS if n <= target.max_rows] + [(min(PREFILL, target.max_rows), 1)]
    needed = context + max(rows for rows, _ in kinds)
    if needed > min(target.context_limit, target.pages * target.page_size):
        raise RequestError(
            f"{needed} tokens do not fit the context limit {target.context_limit}", "lower --context"
        )
    _fill(target, context)
    bandwidth = [read_bandwidth()]
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(WARM_UP):
        for rows, outputs in kinds:
            _time(target, context, rows, outputs)
    while any(_unfinished(own, budget_s) for own in times):
        for (rows, outputs), own in zip(kinds, times, strict=True):
            if _unfinished(own, budget_s):
                own.append(_time(target, context, rows, outputs))
        bandwidth.append(read_bandwidth() if len(times[0]) % 16 == 1 else 0.0)
    bandwidth.append(read_bandwidth())
    one = median(times[0])
    costs = [
        _cost(rows, outputs, own, one, weight_bytes + context * kv_bytes_per_token, max(bandwidth))
        for (rows, outputs), own in zip(kinds, times, strict=True)
    ]
    operations = [] if op_times is None else _operations(target, op_times, kinds, context, budget_s)
    return Profile(weight_bytes, kv_bytes_per_token, max(bandwidth), context, costs, operations)


def _operations(
    target: Target,
    op_times: Callable[[Rows], dict[str, float]],
    kinds: Sequence[tuple[int, int]],
    context: int,
    budget_s: float,
) -> list[OperationCost]:
    found: dict[str, dict[int, float]] = {}
    for rows, outputs in kinds:
        if rows not in APART:
            continue
        asked = rows_at(target, context, rows, outputs)
        times: list[dict[str, float]] = []
        while _unfinished([sum(one.values()) for one in times], budget_s):
            times.append(op_times(asked))
        for name in times[0]:
            found.setdefault(name, {})[rows] = median(one[name] for one in times)
    costs = [OperationCost(name, seconds) for name, seconds in found.items()]
    return sorted(costs, key=lambda cost: -cost.seconds.get(1, 0.0))


def _fill(target: Target, context: int) -> None:
    for start in range(0, context, target.max_rows):
        target.forward(rows_at(target, start, min(target.max_rows, context - start), 0))


def _time(target: Target, context: int, rows: int, outputs: int) -> float:
    asked = rows_at(target, context, rows, outputs)
    started = time.perf_counter()
    target.forward(asked)
    return time.perf_counter() - started


def _unfinished(times: Sequence[float], budget_s: float) -> bool:
    return not times or sum(times) < budget_s


def _cost(
    rows: int, outputs: int, times: Sequence[float], one: float, moved: int, bandwidth: float
) -> PassCost:
    seconds = median(times)
    share = moved / seconds / bandwidth if bandwidth > 0 else 0.0
    return PassCost(rows, outputs, len(times), seconds, min(times), seconds / one, moved, share)
