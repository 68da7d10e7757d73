"""The arithmetic of benchmarks: from samples to figures. Nothing here measures or prints.

Rules, each of which a published benchmark has broken: a speed is total tokens over total time, never a mean
of speeds; tokens are counted the same way in every arm, from ids or the server's usage, never from chunks or
re-tokenised text; an arm is compared only on prompts that every compared arm answered; a failed prompt has
no numbers at all; an output that differs is reported with its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core import Claims, SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt answered by one arm.

    Attributes:
        arm: name of the arm.
        prompt: identity of the prompt; samples with equal identity are comparable.
        prompt_tokens: length of the prompt; `cached_tokens` of them were not computed again.
        completion_tokens: tokens generated, by the engine's ids or the server's usage.
        prefill_s: seconds of prompt processing; None where a server does not tell.
        decode_s: seconds from the first token to the last.
        first_token_s: seconds from the request to its first token.
        tokens: generated ids; None where a server does not tell.
        speculation: what speculation did; None where a server does not tell.
    """

    arm: str
    prompt: str
    category: str
    prompt_tokens: int
    completion_tokens: int
    decode_s: float
    first_token_s: float
    cached_tokens: int = 0
    prefill_s: float | None = None
    tokens: tuple[int, ...] | None = None
    text: str = ""
    finish_reason: str = ""
    speculation: SpeculationStats | None = None

    @property
    def decode_tokens(self) -> int:
        """Tokens that decoding made: all but the first, which prefill yields."""
        return max(self.completion_tokens - 1, 0)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Seconds from first to last token, per token after the first; None for fewer than two tokens."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else None


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that one arm could not answer."""

    arm: str
    prompt: str
    category: str
    message: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an arm's output left the reference arm's: `index` counts tokens, or characters of text."""

    prompt: str
    reference: str
    arm: str
    unit: str
    index: int


@dataclass(frozen=True, slots=True)
class Quantiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Whether chances of one class come true.

    Attributes:
        decided: draft tokens of these chances that the target decided on.
        predicted: their mean chance.
        accepted: the share that was right.
    """

    decided: int
    predicted: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over requests. The mean acceptance length counts the bonus token, the acceptance rate does not.

    Attributes:
        per_position: share of drafting passes whose first i+1 draft tokens were all accepted.
        drafted_by: draft tokens offered by each drafter, and
        accepted_by: those kept.
        reliability: of each drafter's chances, by classes, the lowest first.
        off_reasons: how many requests drafted nothing, by reason.
    """

    passes: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    acceptance_rate: float
    per_position: list[float]
    drafted_by: dict[str, int]
    accepted_by: dict[str, int]
    reliability: dict[str, list[Reliability]]
    off_reasons: dict[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm over a set of prompts."""

    prompts: int
    prompt_tokens: int
    completion_tokens: int
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    time_to_first_token_s: Quantiles | None
    time_per_output_token_s: Quantiles | None
    acceptance: Acceptance | None


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Decode speed of an arm over the reference arm's, on the prompts both answered.

    Attributes:
        ratio: of total tokens over total time.
        low, high: 95 % bootstrap interval over prompts; None with fewer than two prompts.
        median: of the prompts' own ratios; `worst` the smallest of them.
    """

    ratio: float
    low: float | None
    high: float | None
    median: float
    worst: float
    prompts: int


@dataclass(slots=True)
class Summary:
    """Figures per arm and speed-ups against the first arm, for one category or overall."""

    figures: dict[str, Figures] = field(default_factory=dict)
    speed_ups: dict[str, SpeedUp | None] = field(default_factory=dict)


def time_per_output_token(tokens: int, first_s: float, last_s: float) -> float:
    """Seconds per token of a stream whose first text came at `first_s` and last at `last_s`.

    Chunks do not enter: a server that sends several tokens at once has as many gaps as it likes.
    """
    if tokens < 2:
        raise ValueError(f"{tokens} tokens have no time between them")
    return (last_s - first_s) / (tokens - 1)


def acceptance(stats: Sequence[SpeculationStats]) -> Acceptance:
    """Add up what speculation did over requests."""
    passes = sum(s.passes for s in stats)
    drafts = sum(s.drafts for s in stats)
    drafted = sum(s.drafted for s in stats)
    accepted = sum(s.accepted for s in stats)
    positions: Counter[int] = Counter()
    drafted_by: Counter[str] = Counter()
    accepted_by: Counter[str] = Counter()
    for s in stats:
        positions.update(dict(enumerate(s.accepted_per_position)))
        drafted_by.update({name: d.drafted for name, d in s.by_drafter.items()})
        accepted_by.update({name: d.accepted for name, d in s.by_drafter.items()})
    return Acceptance(
        passes=passes,
        drafted=drafted,
        accepted=accepted,
        mean_acceptance_length=sum(s.committed for s in stats) / passes if passes else 1.0,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        per_position=[positions[i] / drafts for i in sorted(positions)] if drafts else [],
        drafted_by=dict(drafted_by),
        accepted_by=dict(accepted_by),
        reliability={name: _reliability(stats, name) for name in drafted_by},
        off_reasons=dict(Counter(s.off_reason for s in stats if s.off_reason)),
    )


def _reliability(stats: Sequence[SpeculationStats], drafter: str) -> list[Reliability]:
    sums: dict[int, Claims] = {}
    for its in (s.by_drafter[drafter] for s in stats if drafter in s.by_drafter):
        for place, claims in its.claims.items():
            total = sums.setdefault(place, Claims())
            total.decided += claims.decided
            total.expected += claims.expected
            total.right += claims.right
    return [
        Reliability(c.decided, c.expected / c.decided, c.right / c.decided) for _, c in sorted(sums.items())
    ]


def figures(samples: Sequence[Sample]) -> Figures:
    """Sum up one arm's samples; totals over totals, quantiles over requests."""
    known = [s for s in samples if s.prefill_s is not None]
    computed = sum(s.prompt_tokens - s.cached_tokens for s in known)
    prefill_s = sum(s.prefill_s or 0.0 for s in known)
    speculation = [s.speculation for s in samples if s.speculation is not None]
    return Figures(
        prompts=len({s.prompt for s in samples}),
        prompt_tokens=sum(s.prompt_tokens for s in samples),
        completion_tokens=sum(s.completion_tokens for s in samples),
        decode_tokens_per_s=_rate(samples),
        prefill_tokens_per_s=computed / prefill_s if prefill_s > 0 else None,
        time_to_first_token_s=quantiles([s.first_token_s for s in samples]),
        time_per_output_token_s=quantiles(
            [t for s in samples if (t := s.time_per_output_token_s) is not None]
        ),
        acceptance=acceptance(speculation) if speculation else None,
    )


def quantiles(values: Sequence[float]) -> Quantiles | None:
    if not values:
        return None
    p50, p90, p99 = np.quantile(np.asarray(values), [0.5, 0.9, 0.99]).tolist()
    return Quantiles(p50, p90, p99)


def speed_up(
    samples: Iterable[Sample], reference: str, arm: str, *, resamples: int = 2000, seed: int = 0
) -> SpeedUp | None:
    """Compare two arms on the prompts that both answered with something to decode.

    The interval resamples prompts, not tokens: prompts differ far more than repetitions do (percentile
    bootstrap, Efron 1979). Returns None when there is nothing to compare.
    """
    table = _paired(samples, reference, arm)
    if not len(table):
        return None
    own = _ratios(table)
    low = high = None
    if len(table) > 1:
        picks = np.random.default_rng(seed).integers(len(table), size=(resamples, len(table)))
        low, high = np.quantile(_ratios(table[picks].sum(axis=1)), [0.025, 0.975]).tolist()
    total = float(_ratios(table.sum(axis=0, keepdims=True))[0])
    return SpeedUp(total, low, high, float(np.median(own)), float(own.min()), len(table))


def first_difference(reference: Sample, other: Sample) -> Difference | None:
    """Where two outputs part: by token ids when both have them, else by text. None when they are equal."""
    if reference.tokens is not None and other.tokens is not None:
        return _difference(reference, other, "token", reference.tokens, other.tokens)
    return _difference(reference, other, "character", reference.text, other.text)


def summarize(samples: Sequence[Sample], arms: Sequence[str]) -> Summary:
    """Figures of every arm, and speed-ups of every arm against the first one."""
    summary = Summary()
    for arm in arms:
        mine = [s for s in samples if s.arm == arm]
        if mine:
            summary.figures[arm] = figures(mine)
            summary.speed_ups[arm] = speed_up(samples, arms[0], arm)
    return summary


def answered_by_all(samples: Sequence[Sample], arms: Sequence[str]) -> list[Sample]:
    """Only the samples of prompts that every arm answered, so that all arms are judged on the same ones."""
    answered = Counter(prompt for prompt, _ in {(s.prompt, s.arm) for s in samples})
    return [s for s in samples if answered[s.prompt] == len(arms)]


def _rate(samples: Sequence[Sample]) -> float | None:
    seconds = sum(s.decode_s for s in samples)
    return sum(s.decode_tokens for s in samples) / seconds if seconds > 0 else None


def _paired(samples: Iterable[Sample], reference: str, arm: str) -> NDArray[np.float64]:
    """[prompts, 4]: tokens and seconds of the reference, tokens and seconds of the arm, repetitions added."""
    sums: dict[str, NDArray[np.float64]] = {}
    for s in samples:
        row = sums.setdefault(s.prompt, np.zeros(4))
        if s.arm == reference:
            row[:2] += s.decode_tokens, s.decode_s
        if s.arm == arm:
            row[2:] += s.decode_tokens, s.decode_s
    rows = [row for row in sums.values() if (row > 0).all()]
    return np.array(rows).reshape(-1, 4)


def _ratios(table: NDArray[np.float64]) -> NDArray[np.float64]:
    ratios: NDArray[np.float64] = (table[:, 2] / table[:, 3]) / (table[:, 0] / table[:, 1])
    return ratios


def _difference(
    reference: Sample, other: Sample, unit: str, a: Sequence[object], b: Sequence[object]
) -> Difference | None:
    if a == b:
        return None
    shorter = min(len(a), len(b))
    index = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    return Difference(reference.prompt, reference.arm, other.arm, unit, index)
