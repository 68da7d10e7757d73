"""Which token a draft model writes: its logits under the target's ids, and the request's own way to choose.

The noise of a request belongs to the target's ids. So a draft model's logits are laid out under those ids
before a token is drawn, and equal probabilities lead to equal tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Context, Floats, Ids
from paceline.sampling.sampler import Sampler
from paceline.text.pairing import Pairing


class Subset:
    """Those of the target's ids that can be written, each with a place among the values to choose from.

    Args:
        ids: [n] distinct ids.
        size: length of a row under the target's ids.
    """

    def __init__(self, ids: NDArray[np.integer[Any]], size: int) -> None:
        self._all = len(ids) == size and bool((ids == np.arange(size)).all())
        self._places = ids
        self._index = np.full(size, -1, np.int32)
        self._index[ids] = np.arange(len(ids), dtype=np.int32)
        self._row: Floats = np.full(size, -np.inf, np.float32)

    def pick(self, values: Floats, sampler: Sampler, position: int) -> tuple[int, float]:
        """The index of what the request's sampler takes, and its probability.

        Raises:
            RequestError, ModelFileError: nothing can be taken.
        """
        if not sampler.needs_logits:
            index = int(values.argmax())
        elif self._all:
            index = sampler.pick(values, int(values.argmax()), position)
        else:
            self._row[self._places] = values
            index = int(self._index[sampler.pick(self._row, int(self._row.argmax()), position)])
        return index, _share(values, index, sampler)

    def pick_rival(
        self, values: Floats, index: int, sampler: Sampler, position: int
    ) -> tuple[int, float] | None:
        """What would have been taken without the first, and its share of what the first leaves.

        Overwrites `values[index]`.
        """
        values[index] = -np.inf
        return self.pick(values, sampler, position) if np.isfinite(values.max()) else None


class Choices(Subset):
    """What a draft model may write, and where that stands among the target's ids.

    In mode "text" it may also write what the target has no id for: such a token stands behind the target's,
    so it draws noise of its own.

    Args:
        known: ids that the draft's tokenizer has; a row of logits may be longer.

    Attributes:
        size: length of a row under the target's ids.
        written: [n] the draft's ids that it may write.
        places: [n] where each stands in a row.
    """

    def __init__(self, pairing: Pairing, known: int) -> None:
        draft_vocab, target_vocab = len(pairing.to_target), len(pairing.to_draft)
        own: Ids = np.arange(draft_vocab, dtype=np.int32)
        places = pairing.to_target.copy()
        # Of twins, two of the draft's ids with one meaning, only one may stand there.
        lost = (places < 0) | (pairing.to_draft[np.maximum(places, 0)] != own)
        places[lost] = -1
        self.size = min(draft_vocab, target_vocab) if pairing.mode == "same" else target_vocab
        if pairing.mode == "text":
            places[lost] = target_vocab + own[lost]
            places[known:] = -1
            self.size = target_vocab + draft_vocab
        sources = np.flatnonzero(places >= 0)
        self.places: list[int] = places[sources].tolist()
        self.written: list[int] = sources.tolist()
        self._front = len(sources) == 0 or int(sources[-1]) == len(sources) - 1
        self._sources = sources
        super().__init__(places[sources], self.size)

    def values(self, logits: Floats) -> Floats:
        """[n] logits of what may be written; may be a view of `logits`."""
        return logits[: len(self.written)] if self._front else logits[self._sources]


def _share(values: Floats, index: int, sampler: Sampler) -> float:
    """Probability at the request's temperature."""
    temperature = 1.0 if sampler.params.greedy else max(sampler.params.temperature, 1e-3)
    scaled = (values - values.max()) / np.float32(temperature)
    np.exp(scaled, out=scaled)
    return float(scaled[index] / scaled.sum())


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
