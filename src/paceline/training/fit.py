"""Fitting a head to transcripts: batches drawn at random, AdamW, a rate that rises and falls."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.training.head import Batch, Head
from paceline.training.transcripts import Report, Transcript

_WARM_UP = 0.05
_LEAST_RATE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to fit.

    Attributes:
        steps: batches.
        texts, window: pieces of a batch, and tokens of each.
        rate: the highest learning rate.
        seed: of weights, batches and noise.
    """

    steps: int = 600
    texts: int = 8
    window: int = 96
    rate: float = 3e-3
    seed: int = 0


def fit(
    head: Head, transcripts: Sequence[Transcript], recipe: Recipe, report: Report = lambda _: None
) -> None:
    """Fit a head in place.

    Raises:
        UsageError: there is too little text.
    """
    windows = _Windows(transcripts, recipe)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.monotonic()
    mean = 0.0
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * _share(step, recipe.steps)
        loss = head.loss(windows.draw(head.needs))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        mean += (loss.item() - mean) / min(step + 1, 20)
        if (step + 1) % max(1, recipe.steps // 10) == 0:
            spent = time.monotonic() - started
            left = spent / (step + 1) * (recipe.steps - step - 1)
            report(f"step {step + 1} of {recipe.steps}: loss {mean:.3f}, {spent:.0f} s, {left:.0f} s left")


def _share(step: int, steps: int) -> float:
    """Of the highest rate: up in a line, down in half a cosine."""
    rise = (step + 1) / max(1.0, _WARM_UP * steps)
    fall = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return min(rise, _LEAST_RATE + (1.0 - _LEAST_RATE) * fall)


class _Windows:
    """Pieces of transcripts, each token of a text as likely as any other to be where one begins."""

    def __init__(self, transcripts: Sequence[Transcript], recipe: Recipe) -> None:
        self._texts = [text for text in transcripts if len(text) > recipe.window]
        if not self._texts:
            longest = max((len(text) for text in transcripts), default=0)
            raise UsageError(
                f"the longest of {len(transcripts)} texts has {longest} tokens, a window {recipe.window}",
                "have the target write longer texts, or fit with a shorter window",
            )
        self._recipe = recipe
        self._rng = np.random.default_rng(recipe.seed)
        starts = np.array([len(text) - recipe.window for text in self._texts])
        self._chances = starts / starts.sum()

    def draw(self, layers: frozenset[int]) -> Batch:
        size, count = self._recipe.window, self._recipe.texts
        chosen = [self._texts[i] for i in self._rng.choice(len(self._texts), count, p=self._chances)]
        starts = [int(self._rng.integers(0, len(text) - size + 1)) for text in chosen]
        cuts = list(zip(chosen, starts, strict=True))
        tokens = np.stack([text.tokens[at : at + size] for text, at in cuts]).astype(np.int64)
        counted = np.stack([np.arange(at, at + size) >= text.written for text, at in cuts])
        states = {
            layer: torch.from_numpy(np.stack([text.states[layer][at : at + size - 1] for text, at in cuts]))
            for layer in layers
        }
        return Batch(torch.from_numpy(tokens), torch.from_numpy(counted), states)
