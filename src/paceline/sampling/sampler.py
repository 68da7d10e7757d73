"""One request's sampler: which token follows, given a row of logits and an absolute position."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from paceline.core import Constraint, Floats, Mask, SamplingParams, TokenLogprob
from paceline.errors import ModelFileError, RequestError
from paceline.sampling import processors
from paceline.sampling.noise import Doubles, Indices, Noise
from paceline.sampling.race import race, race_among, race_nucleus, scale

Flags = NDArray[np.bool_]


class Sampler:
    """Turns logits into tokens, and remembers what was committed.

    The history behind penalties and min_tokens, and the constraint, move only by `advance`, once per
    committed token; a rejected draft never touches them, so there is nothing to roll back.

    Args:
        params: how to sample.
        prompt_ids: the prompt; repetition_penalty counts its tokens as seen.
        stop_ids: every token that would end the text; min_tokens bans them.
        vocab_size: length of a row of logits.
        seed: key of the noise, any integer in [-2^63, 2^64).
        constraint: what limits the text, at its start; the sampler advances it.

    Raises:
        RequestError: logit_bias or stop_token_ids names a token outside the vocabulary, or ignore_eos
            forbids the end that a constraint leads to.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stop_ids: Collection[int],
        vocab_size: int,
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        if constraint is not None and params.ignore_eos:
            raise RequestError(
                "ignore_eos is True, but a constrained text that is complete can only end",
                "leave out ignore_eos, or the constraint",
            )
        self.params = params
        self.vocab_size = vocab_size
        self.noise = Noise(seed, vocab_size)
        self.generated = 0
        self._constraint = constraint
        _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
        _check_ids(params.logit_bias, vocab_size, "logit_bias")
        # A model's own end token may lie beyond its logits; it cannot be sampled then.
        self._stop_ids = np.array(sorted(token for token in stop_ids if token < vocab_size), np.int64)
        self._bias_ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._counting = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self._repeating = params.repetition_penalty != 1.0
        self._seen = _Counts()
        if self._repeating:
            for token in dict.fromkeys(prompt_ids):
                self._seen.add(token, 0)

    @property
    def needs_logits(self) -> bool:
        """Whether the next pass must return logits; if not, its argmax is enough."""
        return (
            not self.params.greedy
            or self.params.logprobs is not None
            or self._constraint is not None
            or self._adjusts
        )

    def pick(self, logits: Floats | None, argmax: int, position: int) -> int:
        """The token that stands at `position`.

        Args:
            logits: [vocab] raw logits of the row before it; may be None while `needs_logits` is False.
            argmax: likeliest token of that row, lowest id on ties.
            position: absolute position of the token to pick; it keys the noise.

        Raises:
            ModelFileError: the logits hold NaN or +inf, or nothing finite.
            RequestError: min_tokens bans every token, or the constraint allows none.
        """
        mask = self._mask()
        if mask is not None and np.count_nonzero(mask) == 1 and (only := _only(mask)) is not None:
            return only
        if self.params.greedy and not self._adjusts and (mask is None or _allows(mask, argmax)):
            return argmax
        assert logits is not None, "needs_logits was ignored"
        if self._untruncated and not self._adjusts and mask is not None and np.isfinite(logits.max()):
            # The winner of the race among all tokens, if it is allowed, is the winner among the allowed.
            token = self._draw(logits, position)
            if _allows(mask, token):
                return token
        row = self._adjusted(logits, mask)
        if self.params.greedy:
            return int(row.argmax())
        return self._draw(row, position)

    def advance(self, token: int) -> None:
        """Follow one committed token."""
        if self._constraint is not None:
            self._constraint.advance(token)
        self.generated += 1
        if self._repeating or self._counting:
            self._seen.add(token, 1)

    def ahead(self) -> Sampler:
        """A sampler that stands where this one does, to try tokens on; it knows of no constraint."""
        twin = copy(self)
        twin._constraint = None
        if self._repeating or self._counting:
            twin._seen = self._seen.copy()
        return twin

    def support(self, logits: Floats) -> tuple[Indices, Doubles]:
        """The distribution that `pick` draws from next: [kept] ids, ascending, and [kept] probabilities."""
        row = self._adjusted(logits, self._mask())
        if self.params.greedy:
            return np.array([row.argmax()]), np.ones(1)
        ids = self._kept(row)
        weights = np.exp(scale(row[ids], float(row.max()), self.params.temperature))
        return ids, weights / weights.sum()

    def distribution(self, logits: Floats) -> Doubles:
        """[vocab] `support`, written out over the whole vocabulary."""
        ids, probabilities = self.support(logits)
        dense = np.zeros(self.vocab_size)
        dense[ids] = probabilities
        return dense

    def logprobs(self, logits: Floats, token: int) -> TokenLogprob:
        """Log-softmax of the raw logits ([vocab]) for `token` and the likeliest alternatives.

        The alternatives are sorted by falling probability, equal ones by rising id, and include `token`
        if it is among them, as in vLLM.
        """
        best = logits.max()
        if not np.isfinite(best):
            raise _unusable(logits)
        log_total = float(np.log(np.exp(logits - best).sum()))
        count = min(self.params.logprobs or 0, self.vocab_size)
        ids = processors.top_k_ids(logits, count) if count else np.empty(0, np.int64)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        shares = scale(logits[np.append(ids, token)], float(best), 1.0) - log_total
        top = tuple(zip(ids.tolist(), shares[:-1].tolist(), strict=True))
        return TokenLogprob(token, float(shares[-1]), top)

    @property
    def _banning(self) -> bool:
        return self.generated < self.params.min_tokens and len(self._stop_ids) > 0

    @property
    def _adjusts(self) -> bool:
        return self._repeating or self._counting or len(self._bias_ids) > 0 or self._banning

    @property
    def _untruncated(self) -> bool:
        params = self.params
        return not params.greedy and params.top_k <= 0 and params.top_p == 1.0 and params.min_p == 0.0

    def _mask(self) -> Mask | None:
        return None if self._constraint is None else self._constraint.mask()

    def _draw(self, row: Floats, position: int) -> int:
        """Gumbel-max among the tokens that the truncations keep; `_kept` lists the same tokens."""
        params, noise = self.params, self.noise
        few = 0 < params.top_k < self.vocab_size
        if params.top_p < 1.0 and not few:
            return race_nucleus(row, params.temperature, params.top_p, params.min_p, noise, position)
        if few or params.min_p > 0.0:
            return race_among(row, self._kept(row), params.temperature, noise, position)
        return race(row, params.temperature, noise, position)

    def _kept(self, row: Floats) -> Indices:
        params = self.params
        return processors.keep(row, params.temperature, params.top_k, params.top_p, params.min_p)

    def _adjusted(self, logits: Floats, mask: Mask | None) -> Floats:
        """Penalties, bias, mask and bans on a copy; the row itself when there are none. Checks the result."""
        row = logits
        if self._adjusts or mask is not None:
            row = logits.copy()
            self._penalise(row)
            row[self._bias_ids] += self._bias
            allowed = None if mask is None else _flags(mask, self.vocab_size)
            if allowed is not None:
                row[~allowed] = -np.inf
            if self._banning and not self._must_stop(allowed):
                row[self._stop_ids] = -np.inf
        if not np.isfinite(row.max()):
            raise _spoilt(self.params, logits, row, mask)
        return row

    def _must_stop(self, allowed: Flags | None) -> bool:
        """Whether the constraint leaves nothing but stop tokens: min_tokens cannot ask for more text then."""
        if allowed is None:
            return False
        return bool(np.count_nonzero(allowed) == np.count_nonzero(allowed[self._stop_ids]))

    def _penalise(self, row: Floats) -> None:
        params, ids, counts = self.params, self._seen.ids, self._seen.counts
        values = row[ids]
        if self._repeating:
            values = processors.penalise_repetition(values, params.repetition_penalty)
        if self._counting:
            values = processors.penalise_counts(
                values, counts, params.frequency_penalty, params.presence_penalty
            )
        row[ids] = values


class _Counts:
    """How often each token occurred, as arrays that grow by doubling: adding a token is O(1)."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def copy(self) -> _Counts:
        twin = _Counts()
        twin._place, twin._ids, twin._counts = self._place.copy(), self._ids.copy(), self._counts.copy()
        return twin

    @property
    def ids(self) -> Indices:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Floats:
        return self._counts[: len(self._place)]

    def add(self, token: int, times: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += times


def _allows(mask: Mask, token: int) -> bool:
    word, bit = divmod(token, 32)
    return word < len(mask) and bool(int(mask[word]) >> bit & 1)


def _only(mask: Mask) -> int | None:
    """The one id of a mask of one nonzero word; None if there are several."""
    word = int(mask.argmax())
    bits = int(mask[word])
    return word * 32 + bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _flags(mask: Mask, vocab_size: int) -> Flags:
    """[vocab] the mask, one truth value per id."""
    octets = mask.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, count=vocab_size, bitorder="little").view(np.bool_)


def _check_ids(ids: Collection[int], vocab_size: int, name: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} names token {token}, outside the vocabulary of {vocab_size}",
                f"use ids from 0 to {vocab_size - 1}",
            )


def _unusable(logits: Floats) -> ModelFileError:
    bad = int(np.count_nonzero(np.isnan(logits) | np.isposinf(logits)))
    found = f"{bad} NaN or +inf among" if bad else "-inf for all of"
    return ModelFileError(
        f"the model computed {found} {len(logits)} logits, and no token can be chosen from them",
        "the model file is probably damaged; fetch it again",
    )


def _spoilt(
    params: SamplingParams, logits: Floats, row: Floats, mask: Mask | None
) -> ModelFileError | RequestError:
    """Tell a request that spoilt sound logits from a model that had none."""
    if not np.isfinite(logits.max()):
        return _unusable(logits)
    if row.max() != -np.inf:
        return RequestError(
            f"repetition_penalty {params.repetition_penalty} takes logits beyond the range of float32",
            "use a value near 1",
        )
    if mask is not None:
        count = int(np.bitwise_count(mask).sum())
        return RequestError(
            f"the constraint allows {count} of {len(row)} tokens here, and the model can write none of them",
            "check that the constraint describes text that this model's vocabulary can spell",
        )
    return RequestError(
        f"min_tokens bans every one of the {len(row)} tokens",
        "lower min_tokens, or name fewer stop_token_ids",
    )
