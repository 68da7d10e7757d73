"""Gumbel-max: the token with the greatest scaled logit plus noise is a sample of the softmax.

Source: Gumbel's maximum theorem; see Maddison, Tarlow, Minka, "A* sampling" (NeurIPS 2014) for drawing
the maximum first.
"""

from __future__ import annotations

import numpy as np

from paceline.core import Floats
from paceline.sampling.noise import BLOCK, Doubles, Indices, Noise
from paceline.sampling.processors import min_p_floor, weigh

_GUESS = -1.0
_MARGIN = 1e-9
_FEW = BLOCK


def race(row: Floats, temperature: float, noise: Noise, position: int) -> int:
    """Sample a token of softmax(row / temperature) with the noise of an absolute position.

    Looks at every logit once, and at the noise of a few tokens only. The noise is exactly that of
    `race_among`; the pruning is exact too:

    Let s = (logit - best logit) / temperature and let c be the ceiling of a token's block, so that the
    token's score is at most s + c. If some token is known to score at least `least`, then a token with
    s + c < least loses for certain, whatever its own noise. `least` starts from a guess (the best token's
    noise is above -1 in 93 % of cases); if no token seen scores that much the guess was not a bound, and
    the best score seen, which is one, takes its place. `_MARGIN` covers the rounding of the logarithms.

    Args:
        row: [vocab] logits, finite or -inf, the greatest finite.
        temperature: above 0.
        noise: the request's noise.
        position: absolute position where the token will stand.

    Returns:
        The winning id, the lowest one on ties.
    """
    tops = np.maximum.reduceat(row, np.arange(0, len(row), BLOCK))
    best = float(tops.max())
    owners, ceilings = noise.ceilings(position)
    owned = row[np.minimum(owners, len(row) - 1)]
    leads = np.where(owners < len(row), scale(owned, best, temperature) + ceilings, -np.inf)
    least = max(_GUESS, leads.max())
    while True:
        floors = best + temperature * (least - ceilings - _MARGIN)
        ids = _reaching(row, tops, np.nextafter(floors.astype(np.float32), np.float32(-np.inf)))
        scores = scale(row[ids], best, temperature) + noise.gumbel(position, ids)
        winner = scores.argmax()
        if scores[winner] >= least:
            return int(ids[winner])
        least = scores[winner]


def race_among(row: Floats, ids: Indices, temperature: float, noise: Noise, position: int) -> int:
    """`race` among the given ids only ([n], ascending): sample the softmax restricted to them."""
    if len(ids) > _FEW:
        masked = np.full_like(row, -np.inf)
        masked[ids] = row[ids]
        return race(masked, temperature, noise, position)
    values = row[ids]
    scores = scale(values, float(values.max()), temperature) + noise.gumbel(position, ids)
    return int(ids[scores.argmax()])


def race_nucleus(
    row: Floats, temperature: float, top_p: float, min_p: float, noise: Noise, position: int
) -> int:
    """`race` among the tokens that top_p and min_p keep, without finding them all.

    A token is in the nucleus if the tokens ahead of it (greater logits, or equal ones and lower ids) weigh
    less than top_p of the total. The winner among all tokens, if it is kept, is the winner among the kept;
    if it is not, nothing behind it is kept either, and the race is run again among those ahead of it.
    """
    field = row
    if min_p > 0.0:
        field = np.where(row >= min_p_floor(row, temperature, min_p), row, np.float32(-np.inf))
    best = row.max()
    total: float | None = None
    while True:
        winner = race(field, temperature, noise, position)
        ahead = row > row[winner]
        ahead[:winner] |= row[:winner] == row[winner]
        lead = float(weigh(row[ahead], best, temperature).sum(dtype=np.float64))
        own = float(weigh(row[winner : winner + 1], best, temperature)[0])
        # The total is at least lead + own, which often settles it without a pass over the vocabulary.
        if lead < top_p * (lead + own):
            return winner
        total = float(weigh(row, best, temperature).sum()) if total is None else total
        if lead < top_p * total:
            return winner
        field = np.where(ahead, field, np.float32(-np.inf))


def scale(values: Floats, best: float, temperature: float) -> Doubles:
    """(values - best) / temperature in float64; the best token is 0 however small the temperature."""
    with np.errstate(over="ignore"):
        return np.asarray((values.astype(np.float64) - best) / temperature)


def _reaching(row: Floats, tops: Floats, floors: Floats) -> Indices:
    """Ids, ascending, whose logit reaches the floor of their block; `tops` are the blocks' maxima."""
    blocks = np.flatnonzero(tops >= floors)
    whole = row[: len(row) // BLOCK * BLOCK].reshape(-1, BLOCK)
    inside = blocks[: np.searchsorted(blocks, len(whole))]
    places = np.flatnonzero(whole[inside] >= floors[inside, None])
    ids: Indices = inside[places // BLOCK] * BLOCK + places % BLOCK
    if len(inside) < len(blocks):
        ragged = len(whole) * BLOCK
        ids = np.concatenate((ids, ragged + np.flatnonzero(row[ragged:] >= floors[-1])))
    return ids
