"""Several MTP heads by their formulas: head k makes step k over the pairs that all heads share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.tiny_heads import Array
from support.tiny_mtp import ReferenceMtp


class ReferenceHeads(ReferenceMtp):
    """All heads of a file. Every row of the text and of the draft is a pair of a token and a state; a step
    computes all of them anew with its own head.

    Attributes:
        used: how many heads there are to choose from.
    """

    used: int

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.used = self.tiny.heads_in_file
        self.each = [
            {
                name.partition(".")[2]: values.astype(np.float64)
                for name, values in self.tiny.arrays_of(number).items()
            }
            for number in range(self.used)
        ]
        if self.tiny.layout == "Qwen":  # one projection and one set of norms for all
            last = self.each[-1]  # whose arrays were written last
            shared = {name: last[name] for name in last if name.split(".")[0] in _SHARED}
            self.each = [{**weights, **shared} for weights in self.each]

    def turn(self, step: int) -> None:
        """Make `rows` those of a step's head."""
        self.weights = self.each[min(step, self.used - 1)]
        self.embedding = self.weights.get("embed_tokens.weight", self.embedding)

    def chain(
        self, tokens: Sequence[int], states: Sequence[Array], length: int
    ) -> tuple[list[int], list[Array]]:
        fed, given = list(tokens[1:]), self.fused(states)
        self.known = len(fed)
        guesses: list[int] = []
        logits: list[Array] = []
        for step in range(length):
            self.turn(step)
            found, made = self.rows(fed, given)
            logits.append(found[-1])
            guesses.append(int(found[-1].argmax()))
            fed, given = [*fed, guesses[-1]], np.concatenate([given, made[-1:]])
        return guesses, logits


_SHARED = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
