"""Does speculation change anything here? A short test on the user's own model, file and machine.

Two halves: a row of a pass must have the same bits whatever other rows share the pass, and a request must
get the same token ids with speculation as without.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.core import ROOT, Floats, Ids, Rows, SamplingParams, Target
from paceline.engine import LLM

GROUPS = (1, 2, 3, 4, 5, 8, 13, 16, 32)
COMPANY = 3
PACES = ((1, 1, 1), (1, 5, 2), (16, 1, 9))
"""Rows of each of COMPANY sequences in a pass."""

SPECULATIONS = (
    "auto",
    "ngram:num_speculative_tokens=1",
    "ngram:num_speculative_tokens=4",
    "ngram:num_speculative_tokens=16",
    "suffix:num_speculative_tokens=8",
)
PROMPTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return",
    '[{"id": 1, "name": "Ada"}, {"id": 2, "name": "Alan"}, {"id": 3, "name":',
    "Die Katze sitzt auf der Matte. 猫はマットの上に座っています。 Le chat est assis",
    "1 2 3 4 5 1 2 3 4 5 1 2 3",
    "Once upon a time, in a land far away, there lived",
)


@dataclass(frozen=True, slots=True)
class RowFault:
    """Logits at `position` that differ between a pass of one row and a pass of `rows` rows, over so many
    sequences."""

    rows: int
    position: int
    largest_difference: float
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class TextFault:
    """A request whose ids differ from plain decoding's at `index`; reproducible from the other fields."""

    prompt: str
    speculate: str
    params: SamplingParams
    index: int


def row_faults(target: Target, *, length: int = 40, seed: int = 0) -> Iterator[RowFault | None]:
    """Compute random sequences row by row, then in larger and larger passes; compare every bit.

    First one sequence, then COMPANY of them in the same passes, each at its own pace. Yields one item per
    compared group of rows, None where all was equal. Overwrites the target's KV.
    """
    rng = np.random.default_rng(seed)
    texts: list[Ids] = [rng.integers(target.vocab_size, size=length).astype(np.int32) for _ in range(COMPANY)]
    alone = [_logits(target, [text], [1])[0] for text in texts]
    for group in [g for g in (*GROUPS, length) if 1 < g <= min(length, target.max_rows)]:
        yield from _differing(alone[:1], _logits(target, texts[:1], [group]), group)
    pages = target.pages if target.window is None else min(target.pages, target.window.pages)
    fits = pages * target.page_size >= COMPANY * (length + target.page_size)
    for pace in PACES if fits else ():
        if sum(pace) <= target.max_rows:
            yield from _differing(alone, _logits(target, texts, pace), sum(pace))


def _differing(alone: Sequence[Floats], together: Sequence[Floats], rows: int) -> Iterator[RowFault | None]:
    found = False
    for one, other in zip(alone, together, strict=True):
        same = (one.view(np.uint32) == other.view(np.uint32)).all(axis=1)
        for position in np.flatnonzero(~same).tolist():
            found = True
            gap = float(np.abs(one[position] - other[position]).max())
            yield RowFault(rows, position, gap, len(alone))
    if not found:
        yield None


def text_faults(
    llm: LLM,
    *,
    cases: int = 40,
    max_tokens: int = 48,
    seed: int = 0,
    speculations: Sequence[str] = SPECULATIONS,
) -> Iterator[TextFault | None]:
    """Answer random requests plain and with one of `speculations`. Yields one item per case, None where
    equal."""
    for case in range(cases):
        rng = random.Random(f"{seed} {case}")
        prompt, params = rng.choice(PROMPTS), random_params(rng, max_tokens)
        speculate = rng.choice(speculations)
        plain = llm.generate(prompt, params, speculate="off")
        drafted = llm.generate(prompt, params, speculate=speculate)
        index = _first_difference(plain.tokens, drafted.tokens)
        same = index is None and plain.text == drafted.text and plain.finish_reason == drafted.finish_reason
        yield None if same else TextFault(prompt, speculate, params, -1 if index is None else index)


def random_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Draw sampling parameters that reach every processor and every way to end."""
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0)),
        seed=rng.randrange(2**32),
        max_tokens=rng.randint(1, max_tokens),
        ignore_eos=rng.random() < 0.3,
    )
    changes: list[Callable[[], dict[str, Any]]] = [
        lambda: {"top_k": rng.randint(1, 50)},
        lambda: {"top_p": rng.uniform(0.3, 1.0)},
        lambda: {"min_p": rng.uniform(0.0, 0.3)},
        lambda: {"repetition_penalty": rng.uniform(0.8, 1.4)},
        lambda: {"frequency_penalty": rng.uniform(-1.0, 1.0)},
        lambda: {"presence_penalty": rng.uniform(-1.0, 1.0)},
        lambda: {"logit_bias": {rng.randrange(100): rng.uniform(-5, 5)}},
        lambda: {"stop": [rng.choice((" the", "\n", "e ", "3"))]},
        lambda: {"min_tokens": rng.randint(0, params.max_tokens or 0)},
    ]
    for change in rng.sample(changes, rng.randint(0, 3)):
        params = replace(params, **change())
    return params


def _logits(target: Target, texts: Sequence[Ids], pace: Sequence[int]) -> list[Floats]:
    """[length, vocab] logits of each sequence, computed in passes that take pace[i] rows of sequence i."""
    parts: list[list[Floats]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        ends = [min(at + n, len(text)) for at, n, text in zip(done, pace, texts, strict=True)]
        output = target.forward(_rows(target, texts, done, ends))
        assert output.logits is not None
        row = 0
        for part, start, end in zip(parts, done, ends, strict=True):
            part.append(output.logits[row : row + end - start].copy())
            row += end - start
        done = ends
    return [np.concatenate(part) for part in parts]


def _rows(target: Target, texts: Sequence[Ids], starts: Sequence[int], ends: Sequence[int]) -> Rows:
    """Rows starts[i] to ends[i] of each sequence, whose pages lie one after the other."""
    pages = -(-max(map(len, texts)) // target.page_size)
    spans = [np.arange(start, end, dtype=np.int32) for start, end in zip(starts, ends, strict=True)]
    places: Ids = np.concatenate(spans)
    return Rows(
        tokens=np.concatenate([text[span] for text, span in zip(texts, spans, strict=True)]),
        positions=places,
        slots=places.copy(),
        parents=np.full(len(places), ROOT, np.int32),
        sequences=np.repeat(np.arange(len(texts), dtype=np.int32), [len(span) for span in spans]),
        tables=np.arange(len(texts) * pages, dtype=np.int32).reshape(len(texts), pages),
        wanted=np.arange(len(places), dtype=np.int32),
        logits=True,
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
