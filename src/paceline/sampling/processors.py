"""What a request does to a row of logits before a token is drawn. Pure functions on float32 arrays.

The order is that of `SamplingParams`: repetition penalty, frequency and presence penalty, logit_bias,
min_tokens, temperature, top_k, top_p, min_p. The first four change logits; the last three choose which
tokens may be drawn and leave the others' probability ratios alone. All three keep a head of the row
sorted by falling logit, equal logits by rising id, so a tie at a boundary keeps the lowest ids.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.core import Floats
from paceline.sampling.noise import Indices

_COLUMNS = 2048
_SORTABLE = 1024
_BINS = 4096
_COLDEST = 1e-30
"""Temperatures below this act like it: float32 logits that differ are already infinitely far apart."""


def penalise_repetition(values: Floats, penalty: float) -> Floats:
    """Make logits of tokens seen in prompt or output less likely: positive ones divided, others multiplied.

    Source: Keskar et al., "CTRL" (2019), with the sign rule of the implementations in use.
    """
    factor = np.float32(penalty)
    with np.errstate(all="ignore"):  # both products are computed for each value, and one is used
        return np.where(values > 0, values / factor, values * factor)


def penalise_counts(values: Floats, counts: Floats, frequency: float, presence: float) -> Floats:
    """Lower logits by `frequency` for each time a token was generated and by `presence` if it was at all."""
    return values - counts * np.float32(frequency) - (counts > 0) * np.float32(presence)


def keep(row: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Indices:
    """Ids that survive top_k, then top_p (of what top_k left), then min_p.

    Args:
        row: [vocab] logits, finite or -inf, the greatest finite.
        temperature: above 0; top_p and min_p look at softmax(row / temperature).
        top_k: 0 or below keeps all, else exactly min(top_k, vocab) tokens.
        top_p: 1 keeps all.
        min_p: 0 keeps all.

    Returns:
        [kept] ids, ascending, at least one. Tokens at -inf may be among them; they have probability 0.
    """
    ids = top_k_ids(row, top_k) if 0 < top_k < len(row) else None
    if top_p < 1.0:
        ids = _top_p(row, ids, temperature, top_p)
    if min_p > 0.0:
        floor = min_p_floor(row, temperature, min_p)
        ids = np.flatnonzero(row >= floor) if ids is None else ids[row[ids] >= floor]
    return np.arange(len(row)) if ids is None else ids


def top_k_ids(row: Floats, k: int) -> Indices:
    """[k] ids of the k greatest logits, ascending, for 0 < k <= vocab."""
    ids = np.flatnonzero(row >= _at_most_kth(row, k))
    values = row[ids]
    kth = np.partition(values, len(values) - k)[len(values) - k]
    return _head(ids, values, kth, k)


def _at_most_kth(row: Floats, k: int) -> np.float32:
    """A floor no higher than the k-th greatest logit, and not far below it.

    Fold the row into columns: each column's greatest logit is a token, so at least k tokens reach the k-th
    greatest of those. Much cheaper than selecting among the whole row.
    """
    columns = min(_COLUMNS, len(row))
    if k > columns:
        return np.float32(-np.inf)
    tops = row[: len(row) // columns * columns].reshape(-1, columns).max(axis=0)
    return np.float32(np.partition(tops, columns - k)[columns - k])


def _top_p(row: Floats, ids: Indices | None, temperature: float, top_p: float) -> Indices:
    values = row if ids is None else row[ids]
    weights = weigh(values, values.max(), temperature)
    total = float(weights.sum())
    # Tokens below the floor weigh less than half of (1 - top_p) * total, even all together.
    floor = np.float32((1.0 - top_p) * total / len(weights) / 2)
    likely = np.flatnonzero(weights >= floor)
    values = values[likely]
    boundary, count = _nucleus(values, weights[likely], top_p * total)
    return _head(likely if ids is None else ids[likely], values, boundary, count)


def _nucleus(values: Floats, weights: Floats, enough: float) -> tuple[np.float32, int]:
    """The least value and the size of the smallest head of `values` whose weights reach `enough`.

    Many values are first counted into narrow bins, so that only the bin with the boundary is sorted.
    """
    size, mass = 0, 0.0
    if len(values) > _SORTABLE and (spread := np.ptp(values)) > 0:
        bins = ((values.max() - values) / spread * _BINS).astype(np.int64)
        filled = np.cumsum(np.bincount(bins, weights))
        edge = min(int(np.searchsorted(filled, enough)), len(filled) - 1)
        size = int(np.count_nonzero(bins < edge))
        mass = float(filled[edge - 1]) if edge else 0.0
        values, weights = values[bins == edge], weights[bins == edge]
    falling = np.argsort(values)[::-1]
    reaches = mass + np.cumsum(weights[falling], dtype=np.float64)
    last = min(int(np.searchsorted(reaches, enough)), len(falling) - 1)
    return values[falling[last]], size + last + 1


def min_p_floor(row: Floats, temperature: float, min_p: float) -> np.float32:
    """The least float32 logit that min_p above 0 keeps."""
    floor = float(row.max()) + temperature * math.log(min_p)
    least = np.float32(floor)
    return least if float(least) >= floor else np.nextafter(least, np.float32(np.inf))


def weigh(values: Floats, best: np.float32, temperature: float) -> Floats:
    """exp((values - best) / temperature), in float32."""
    weights: Floats = values - best
    with np.errstate(over="ignore", under="ignore"):
        weights /= np.float32(max(temperature, _COLDEST))
        np.exp(weights, out=weights)
    return weights


def _head(ids: Indices, values: Floats, boundary: np.float32, count: int) -> Indices:
    """The `count` greatest of ascending `ids`; `boundary` is the least value kept, lowest ids first."""
    kept = values > boundary
    level = np.flatnonzero(values == boundary)
    kept[level[: count - np.count_nonzero(kept)]] = True
    return ids[kept]
