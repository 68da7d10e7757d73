"""Gumbel-max: the token with the greatest scaled logit plus noise is a sample of the softmax.

Source: Gumbel's maximum theorem; see Maddison, Tarlow, Minka, "A* sampling" (NeurIPS 2014) for drawing
the maximum first.
"""

from __future__ import annotations

import numpy as np

from paceline.core import Floats
from paceline.sampling.noise import BLOCK, Doubles, Indices, Noise

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
    starts = np.arange(0, len(row), BLOCK)
    tops = np.maximum.reduceat(row, starts).astype(np.float64)
    best = tops.max()
    owners, ceilings = noise.ceilings(position, len(starts))
    inside = owners < len(row)
    leads = scale(row[owners[inside]], best, temperature) + ceilings[inside]
    least = max(_GUESS, leads.max(initial=_GUESS))
    while True:
        reach = temperature * (least - ceilings - _MARGIN)
        ids = _within(row, best, tops, reach)
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


def scale(values: Floats, best: float, temperature: float) -> Doubles:
    """(values - best) / temperature in float64; the best token is 0 however small the temperature."""
    with np.errstate(over="ignore"):
        return np.asarray((values.astype(np.float64) - best) / temperature)


def _within(row: Floats, best: float, tops: Doubles, reach: Doubles) -> Indices:
    """Ids, ascending, whose logit is at least `best` plus their block's `reach`."""
    blocks = np.flatnonzero(tops - best >= reach)
    ids: Indices = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    ids = ids[: np.searchsorted(ids, len(row))]
    floors = np.repeat(reach[blocks], BLOCK)[: len(ids)]
    return np.asarray(ids[row[ids].astype(np.float64) - best >= floors])
