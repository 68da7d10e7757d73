"""Engines that answer token ids, one prompt at a time, greedily."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core import SamplingParams, SpeculationStats
from paceline.engine import LLM
from paceline.tools.bench import parse_speculation


@dataclass(frozen=True, slots=True)
class Answer:
    """Attributes:
    prefill_s: until the first token.
    decode_s: from the first token to the last.
    speculation: what speculation did, None where the engine does not tell.
    """

    tokens: list[int]
    prefill_s: float
    decode_s: float
    speculation: SpeculationStats | None = None


class Arm(Protocol):
    """Attributes:
    remembers: what it answered helps it answer the same again, so it must not be asked twice.
    """

    name: str
    remembers: bool

    def describe(self) -> dict[str, Any]:
        """What a reader needs to run the same."""
        ...

    def answer(self, ids: Sequence[int], max_tokens: int) -> Answer: ...


class PacelineArm:
    """Our engine in this process. The clock is the caller's: it runs from the first chunk received to the
    last, so that everything between the passes counts.

    Args:
        warm: keep what drafters and their calibration learnt from earlier prompts; else each starts cold.
    """

    def __init__(self, llm: LLM, speculate: str, *, warm: bool = False) -> None:
        self.name = f"paceline {speculate}" + (" warm" if warm else "")
        self.remembers = warm
        self._llm = llm
        self._warm = warm
        self._speculate = parse_speculation(speculate)

    def describe(self) -> dict[str, Any]:
        return {"engine": "paceline", "speculate": self._speculate, "warm": self._warm}

    def answer(self, ids: Sequence[int], max_tokens: int) -> Answer:
        if self._warm:
            self._llm.engine.clear_cache()
        else:
            self._llm.clear()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        with self._llm.stream(ids, params, speculate=self._speculate) as stream:
            chunks = [next(stream)]
            first = time.perf_counter()
            chunks += stream
            last = time.perf_counter()
        completion = chunks[-1].completion
        assert completion is not None
        return Answer(completion.tokens, completion.timings.prefill_s, last - first, completion.speculation)
