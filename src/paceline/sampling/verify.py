"""Which drafted tokens are kept. Plain decoding is the same walk over an empty draft.

Two rules. *Coupled* compares each draft with the token that the sampler picks at that position from the
target's logits and the position's noise: what is written is the sampler's choice either way, so the text
is that of plain decoding. *Rejection* is textbook speculative sampling (Leviathan et al., 2211.17192; Chen
et al., 2302.01318), with the recursive form for siblings (SpecInfer, 2305.09781; without replacement:
Sequoia, 2402.12374): the distribution is that of plain decoding, the text is another sample of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.core import ROOT, Draft, Floats, Ids
from paceline.sampling.noise import Doubles, Indices, Stream
from paceline.sampling.sampler import Sampler

_SUM_TOLERANCE = 1e-3


def walk(
    draft: Draft, sampler: Sampler, argmax: Ids, logits: Floats | None, first_position: int
) -> Iterator[tuple[int, int]]:
    """Commit tokens one by one, as deep into the draft as the target agrees.

    The sampler has been advanced by each token when it is yielded, and the next row is not looked at
    before the next token is asked for: a consumer that stops early has committed what it took.

    Rejection sampling is exact only if which nodes were drafted, and how many, never depended on a drawn
    token that it left out (dropping a drawn token because it looked unlikely biases the text). Coupled
    verification has no such condition.

    Args:
        draft: the n checked nodes, possibly none.
        sampler: the request's sampler, advanced to the last committed token.
        argmax: [1 + n] likeliest token of each row: row 0 is the last committed token, row 1 + i node i.
        logits: [1 + n, vocab] raw logits of the rows; None if the sampler does not need them.
        first_position: absolute position of the first token to commit, one after the last committed.
            A child of ROOT stands there, its children one further; that position keys the noise.

    Yields:
        (token, node): node is the accepted draft node, or ROOT for the last token, the correction or bonus.
    """
    assert draft.probs is None or draft.probs.shape == (len(draft), sampler.vocab_size)
    children, tokens = _children(draft), draft.tokens
    rejecting = sampler.params.verification == "rejection" and not sampler.params.greedy
    node, position = ROOT, first_position
    while True:
        row = None if logits is None else logits[1 + node]
        siblings = children.get(node, [])
        if rejecting and siblings:
            assert row is not None, "needs_logits was ignored"
            token, node = _reject_or_keep(draft, siblings, sampler, row, position)
        else:
            token = sampler.pick(row, int(argmax[1 + node]), position)
            node = next((child for child in siblings if tokens[child] == token), ROOT)
        sampler.advance(token)
        yield token, node
        if node == ROOT:
            return
        position += 1


def _children(draft: Draft) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)
    return children


def _reject_or_keep(
    draft: Draft, siblings: list[int], sampler: Sampler, row: Floats, position: int
) -> tuple[int, int]:
    """Try siblings in order; returns (token, node), node ROOT if none was kept.

    Accept x with probability min(1, p(x) / q(x)); after a rejection go on with p <- norm(max(p - q, 0)).
    When all are rejected the token is a sample of what p has become.
    """
    ids, p = sampler.support(row)
    tokens = [draft.tokens[node] for node in siblings]
    coins = sampler.noise.uniform(position, tokens, Stream.ACCEPT)
    for i, (node, token) in enumerate(zip(siblings, tokens, strict=True)):
        q = _drawn_from(draft, node, tokens[:i], ids)
        if q is None:
            break
        on_support, at_token = q
        if coins[i] * at_token < p[ids == token].sum():
            return token, node
        p = _residual(p, on_support)
    (u,) = sampler.noise.uniform(position, 0, Stream.RESIDUAL)
    return _draw(ids, p, u), ROOT


def _drawn_from(draft: Draft, node: int, earlier: list[int], ids: Indices) -> tuple[Doubles, float] | None:
    """The distribution that `node` was drawn from, over `ids`, and at the node's own token.

    Siblings differ, so each was drawn without those before it: their share is taken out, which changes
    nothing where the drafter did so itself. None if the distribution cannot be what the token came from;
    nothing sound can be computed with it, so the draft is refused and the target decides alone.
    """
    token = draft.tokens[node]
    if draft.probs is None:
        return (ids == token).astype(np.float64), 1.0
    q = draft.probs[node].astype(np.float64)
    if not (np.isfinite(q).all() and (q >= 0.0).all() and abs(q.sum() - 1.0) <= _SUM_TOLERANCE):
        return None
    q[earlier] = 0.0
    if q[token] <= 0.0:
        return None
    q /= q.sum()
    return q[ids], float(q[token])


def _residual(p: Doubles, q: Doubles) -> Doubles:
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    # Nothing left means p <= q throughout, that is p == q up to rounding: p is then its own limit.
    return np.asarray(left / total) if total > 0.0 else p


def _draw(ids: Indices, p: Doubles, u: float) -> int:
    """Inverse-CDF draw with one uniform number."""
    reached = np.cumsum(p)
    return int(ids[min(int(np.searchsorted(reached, u * reached[-1], side="right")), len(ids) - 1)])
