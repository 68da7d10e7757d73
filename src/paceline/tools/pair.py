"""Can this draft model work for this target, and would it pay? Told from headers, then from a short run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core import Completion, SamplingParams, SpeculationStats
from paceline.engine import LLM
from paceline.planning.forecast import Forecast
from paceline.text.pairing import Comparison, pair
from paceline.text.tokenizer import Tokenizer
from paceline.tools.plan import MemoryPlan, Model, memory_here, plan, resident
from paceline.weights.source import Source

LENGTH = 4
"""Draft tokens per pass while acceptance is measured."""

LONGEST = 12
"""Drafts that the forecast considers."""

SHARED_LEAST = 64
"""A draft model that shares fewer tokens than this with its target is refused: nothing could be told."""


@dataclass(frozen=True, slots=True)
class PairReport:
    """What the headers of two models say.

    Attributes:
        contexts: most tokens of target and draft model.
        obstacles: why the pair cannot work; empty when it can.
        notes: what to know all the same.
    """

    target: str
    draft: str
    comparison: Comparison
    contexts: tuple[int, int]
    memory: MemoryPlan
    obstacles: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """What a short run says; costs are in plain tokens of the target.

    Attributes:
        draft_cost: a pass of the draft model.
        row_cost: checking one draft token.
        acceptance: share of draft tokens accepted, among those whose predecessors were.
        break_even: acceptance at which drafting one token neither gains nor loses.
        best_length: draft tokens per pass that the formula favours, 0 when none pay.
        forecast: speed-up at that length, by the formula.
        measured: speed-up of the same prompts with the planner deciding, over plain decoding.
        mean_acceptance_length: tokens per pass then.
        identical: whether all texts were the same.
    """

    draft_cost: float
    row_cost: float
    acceptance: float
    break_even: float
    best_length: int
    forecast: float
    measured: float
    mean_acceptance_length: float
    identical: bool

    @property
    def pays(self) -> bool:
        return self.best_length > 0


def inspect_pair(target: Source, draft: Source, *, available: int | None = None) -> PairReport:
    """Compare two models by their headers alone.

    Args:
        available: bytes of memory that may be taken; None means what this machine has free.

    Raises:
        ModelFileError, UnsupportedModelError: one of them cannot be run at all.
    """
    models = Model.of(target), Model.of(draft)
    tokenizers = Tokenizer.from_gguf(target.metadata), Tokenizer.from_gguf(draft.metadata)
    comparison = pair(*tokenizers, models[0].vocabulary, models[1].vocabulary).comparison
    memory = plan(
        models[0],
        available=memory_here() if available is None else available,
        runtime=resident(),
        drafters=models[1:],
    )
    contexts = models[0].context_length, models[1].context_length
    obstacles, notes = [], []
    if comparison.shared < min(SHARED_LEAST, comparison.draft_size):
        obstacles.append(f"the vocabularies share {comparison.shared} tokens")
    if not memory.fits or memory.largest_context < 2:
        mib = (memory.total - memory.available) / 2**20
        obstacles.append(f"both together need {mib:.0f} MiB more memory than is free")
    if contexts[1] < contexts[0]:
        notes.append(f"beyond {contexts[1]} tokens of text the draft model is silent")
    return PairReport(
        models[0].name, models[1].name, comparison, contexts, memory, tuple(obstacles), tuple(notes)
    )


def measure_gain(llm: LLM, draft: str, prompts: Sequence[str], *, max_tokens: int = 48) -> Gain:
    """Write answers plain, with drafts of fixed length, and as the planner decides.

    Args:
        draft: as in "model:DRAFT".
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    spec = f"model:{draft}"
    fixed = [llm.generate(p, params, speculate=f"{spec},num_speculative_tokens={LENGTH}") for p in prompts]
    plain: list[Completion] = []
    planned: list[Completion] = []
    for prompt in prompts:  # in turn, so that a slow spell of the machine hits both
        plain.append(llm.generate(prompt, params, speculate="off"))
        planned.append(llm.generate(prompt, params, speculate=spec))
    acceptance = _acceptance([one.speculation for one in fixed])
    costs, (drafter,) = llm.engine.pass_time, llm.draft_models
    assert costs is not None
    token = costs.cost(1)
    forecasts = [
        Forecast(acceptance, n, drafter.costs.cost(1) / token, costs.cost(1 + n) / token)
        for n in range(1, LONGEST + 1)
    ]
    best = max(forecasts, key=lambda forecast: forecast.speedup)
    row = costs.cost(2) / token - 1.0
    committed = sum(one.speculation.committed for one in planned)
    return Gain(
        draft_cost=best.draft_cost,
        row_cost=row,
        acceptance=acceptance,
        break_even=best.draft_cost + row,
        best_length=best.length if best.pays else 0,
        forecast=max(best.speedup, 1.0),
        measured=sum(one.timings.decode_s for one in plain) / sum(one.timings.decode_s for one in planned),
        mean_acceptance_length=committed / max(1, sum(one.speculation.passes for one in planned)),
        identical=all(
            a.tokens == b.tokens == c.tokens for a, b, c in zip(plain, planned, fixed, strict=True)
        ),
    )


def _acceptance(stats: Sequence[SpeculationStats]) -> float:
    """Accepted share of the draft tokens that the target came to decide on, in chains."""
    accepted = sum(one.accepted for one in stats)
    whole = sum(sum(one.accepted_per_position[LENGTH - 1 : LENGTH]) for one in stats)
    refused = sum(one.drafts for one in stats) - whole
    return accepted / max(1, accepted + refused)
