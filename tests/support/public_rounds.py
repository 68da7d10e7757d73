"""What public code drafted, and whether a drafter of ours says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core import Context, Floats
from paceline.models.target import NativeTarget
from support.head_targets import ON, states_of
from support.tiny_heads import Array


@dataclass(frozen=True)
class Round:
    """What a drafter said behind a text.

    Attributes:
        text: [n] tokens; the states of all but the last are known.
        drafts: ids of the target.
        logits: [drafts, ids of the drafter] what each was chosen by.
        sure: [drafts] what its confidence head says of each, as chances; empty without one.
    """

    text: list[int]
    drafts: list[int]
    logits: Array
    sure: Array

    @property
    def largest(self) -> float:
        """Largest logit, whose share a difference is told as."""
        return float(np.abs(self.logits).max())

    def common(self, other: Round) -> int:
        """How many logits of both were computed behind the same drafts."""
        pairs = zip(self.drafts[:-1], other.drafts, strict=False)
        return 1 + next((i for i, (one, two) in enumerate(pairs) if one != two), len(self.drafts) - 1)


def answers(drafter: Any, target: NativeTarget, asked: Sequence[tuple[Sequence[int], int]]) -> list[Round]:
    """What a drafter of ours says behind texts, so many tokens each; each continues the one before."""
    context = Context(0, [], len(asked[0][0]), params=ON)
    said = []
    for text, count in asked:
        known = max(0, len(context.tokens) - 1)
        context.tokens[:] = text
        states = states_of(target, text, drafter.layers)
        drafter.hear(context, known, {layer: found[known:-1] for layer, found in states.items()})
        drafter.commit(context, None)
        watch = _Watch(drafter)
        draft = drafter.propose(context, count)
        watch.end()
        said.append(Round(list(text), draft.tokens, np.array(watch.logits), np.array(watch.sure)))
    return said


class _Watch:
    """Keeps the logits that tokens are picked by, and what a confidence head says of each."""

    def __init__(self, drafter: Any) -> None:
        self.logits: list[Floats] = []
        self.sure: list[float] = []
        self._drafter, self._pick = drafter, drafter._choices.pick
        self._open = drafter._heads.open if hasattr(drafter, "_heads") else None
        drafter._choices.pick = self._picked
        if self._open is not None:
            drafter._heads.open = self._opened

    def end(self) -> None:
        self._drafter._choices.pick = self._pick
        if self._open is not None:
            self._drafter._heads.open = self._open

    def _picked(self, logits: Floats, *rest: Any) -> Any:
        self.logits.append(logits.copy())
        return self._pick(logits, *rest)

    def _opened(self, *given: Any) -> Any:
        assert self._open is not None
        chain = self._open(*given)
        ask = chain.sure

        def sure() -> float | None:
            chance: float | None = ask()
            if chance is not None:
                self.sure.append(chance)
            return chance

        chain.sure = sure
        return chain
