"""Which token a draft model writes: its logits under the target's ids, and the request's own way to choose.

The noise of a request belongs to the target's ids. So a draft model's logits are laid out under those ids
before a token is drawn, and equal probabilities lead to equal tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.core import Context, Floats, Ids
from paceline.sampling.sampler import Sampler
from paceline.text.pairing import Pairing


class Choices:
    """The draft's logits as logits of the target's ids.

    In mode "text" the draft may also write what the target has no id for: such an id stands behind the
    target's, so it draws noise of its own.

    Args:
        known: ids that the draft's tokenizer has; a row of logits may be longer.

    Attributes:
        size: length of a row under the target's ids.
        to_draft: [size] the draft's id, -1 where it must not write.
    """

    def __init__(self, pairing: Pairing, known: int) -> None:
        draft_vocab, target_vocab = len(pairing.to_target), len(pairing.to_draft)
        self._same = pairing.mode == "same"
        places = pairing.to_target.copy()
        self.size = target_vocab
        if self._same:
            self.size = min(draft_vocab, target_vocab)
        elif pairing.mode == "text":
            own: Ids = np.arange(draft_vocab, dtype=np.int32)
            twins = pairing.to_draft[np.maximum(places, 0)] != own
            places[twins | (places < 0)] = target_vocab + own[twins | (places < 0)]
            places[known:] = -1
            self.size = target_vocab + draft_vocab
        to_draft: Ids = np.full(self.size, -1, np.int32)
        sources = np.flatnonzero(places >= 0).astype(np.int32)
        to_draft[places[sources]] = sources  # of twins the later one
        self.to_draft: list[int] = to_draft.tolist()
        self._masked = np.flatnonzero(to_draft < 0)
        self._places = np.flatnonzero(to_draft >= 0)
        self._sources = to_draft[self._places]
        self._row: Floats = np.full(self.size, -np.inf, np.float32)

    def row(self, logits: Floats) -> Floats:
        """[size] logits, -inf where the draft must not write; overwritten by the next call.

        May write to `logits`.
        """
        if self._same:
            row = logits[: self.size]
            row[self._masked] = -np.inf
            return row
        self._row[self._places] = logits[self._sources]
        return self._row


def request_sampler(context: Context, size: int, ends: frozenset[int]) -> Sampler:
    """The request's own sampler, as far as rows of `size` reach; `ends` are the target's end tokens."""
    params = context.params
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
    prompt = [token for token in context.tokens[: context.prompt_length] if token < size]
    its = replace(
        params,
        logit_bias={token: bias for token, bias in params.logit_bias.items() if token < size},
        stop_token_ids=(),
        logprobs=None,
    )
    return Sampler(its, prompt, stops, size, context.seed)


def pick(row: Floats, sampler: Sampler, position: int) -> tuple[int, float]:
    """The token that the request's sampler takes, and its probability.

    Raises:
        RequestError, ModelFileError: nothing can be taken.
    """
    token = sampler.pick(row, int(row.argmax()), position)
    temperature = 1.0 if sampler.params.greedy else max(sampler.params.temperature, 1e-3)
    scaled = (row - row.max()) / np.float32(temperature)
    np.exp(scaled, out=scaled)
    return token, float(scaled[token] / scaled.sum())


def pick_rival(row: Floats, token: int, sampler: Sampler, position: int) -> tuple[int, float] | None:
    """The token that would have been taken without the first, and its share of what the first leaves."""
    kept, row[token] = row[token], -np.inf
    rival = pick(row, sampler, position) if np.isfinite(row.max()) else None
    row[token] = kept
    return rival
