"""A target reduced to arithmetic: logits are a fixed random function of the whole token history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from paceline.core import ROOT, Draft, Floats, SamplingParams
from paceline.sampling import Sampler, walk

Guess = Callable[[tuple[int, ...]], Draft]
"""Offers a draft after a history."""


@lru_cache(maxsize=100_000)
def logits_after(history: tuple[int, ...], vocab_size: int, rounding: float = 0.0) -> Floats:
    """[vocab] logits; `rounding` above 0 makes ties."""
    row = np.random.default_rng([*history, 7, vocab_size]).normal(0, 1.5, vocab_size)
    row = np.round(row / rounding) * rounding if rounding else row
    frozen = row.astype(np.float32)
    frozen.setflags(write=False)
    return frozen


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, the node included."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*found[parent], token) if parent != ROOT else (token,))
    return found


def decode(
    params: SamplingParams,
    prompt: Sequence[int],
    guess: Guess,
    *,
    length: int,
    vocab_size: int,
    seed: int,
    stops: Sequence[int] = (),
    rounding: float = 0.0,
) -> tuple[list[int], list[int]]:
    """Generate `length` tokens; stops are sampled, not obeyed.

    Returns:
        The tokens, and how many each pass committed.
    """
    sampler = Sampler(params, prompt, stops, vocab_size, seed)
    history, steps = list(prompt), []
    while len(history) < len(prompt) + length:
        draft = guess(tuple(history))
        known = [tuple(history), *(tuple(history) + path for path in paths(draft))]
        logits = np.array([logits_after(each, vocab_size, rounding) for each in known])
        argmax = logits.argmax(axis=1).astype(np.int32)
        given = logits if sampler.needs_logits else None
        before = len(history)
        for token, _ in walk(draft, sampler, argmax, given, len(history)):
            history.append(token)
            if len(history) == len(prompt) + length:
                break
        steps.append(len(history) - before)
    return history[len(prompt) :], steps


def nothing(history: tuple[int, ...]) -> Draft:
    """The empty draft: plain decoding."""
    return Draft.empty()
