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
    """Logits at `position` that differ between a pass of one row and a pass of `rows` rows."""

    rows: int
    position: int
    largest_difference: float


@dataclass(frozen=True, slots=True)
class TextFault:
    """A request whose ids differ from plain decoding's at `index`; reproducible from the other fields."""

    prompt: str
    speculate: str
    params: SamplingParams
    index: int


def row_faults(target: Target, *, length: int = 40, seed: int = 0) -> Iterator[RowFault | None]:
    """Compute one random sequence row by row, then in larger and larger passes; compare every bit.

    Yields one item per compared group of rows, None where all was equal. Overwrites the target's KV.
    """
    tokens = np.random.default_rng(seed).integers(target.vocab_size, size=length).astype(np.int32)
    alone = _logits(target, tokens, 1)
    for group in [g for g in (*GROUPS, length) if 1 < g <= min(length, target.max_rows)]:
        together = _logits(target, tokens, group)
        same = (alone.view(np.uint32) == together.view(np.uint32)).all(axis=1)
        wrong = np.flatnonzero(~same)
        if not len(wrong):
            yield None
        for position in wrong.tolist():
            yield RowFault(group, position, float(np.abs(alone[position] - together[position]).max()))


def text_faults(
    llm: LLM, *, cases: int = 40, max_tokens: int = 48, seed: int = 0
) -> Iterator[TextFault | None]:
    """Answer random requests plain and with speculation. Yields one item per case, None where equal."""
    for case in range(cases):
        rng = random.Random(f"{seed} {case}")
        prompt, params = rng.choice(PROMPTS), random_params(rng, max_tokens)
        speculate = rng.choice(SPECULATIONS)
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


def _logits(target: Target, tokens: Ids, group: int) -> Floats:
    """[length, vocab] logits of one sequence computed in passes of `group` rows."""
    parts = []
    for start in range(0, len(tokens), group):
        output = target.forward(_rows(target, tokens, start, min(start + group, len(tokens))))
        assert output.logits is not None
        parts.append(output.logits.copy())
    return np.concatenate(parts)


def _rows(target: Target, tokens: Ids, start: int, end: int) -> Rows:
    places: Ids = np.arange(start, end, dtype=np.int32)
    count = end - start
    return Rows(
        tokens=tokens[start:end],
        positions=places,
        slots=places.copy(),
        parents=np.full(count, ROOT, np.int32),
        sequences=np.zeros(count, np.int32),
        tables=np.arange(-(-len(tokens) // target.page_size), dtype=np.int32)[None],
        wanted=np.arange(count, dtype=np.int32),
        logits=True,
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
