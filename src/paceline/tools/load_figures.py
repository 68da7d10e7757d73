"""The arithmetic of load tests: from replies to the figures of one server at one level; measures nothing.

Definitions. Time to first token runs from the moment a request was due, so that a generator which falls
behind cannot hide waiting. Inter-token latency is per token: a server that sends several tokens at once makes
one gap for all of them, which is shared out evenly by the `usage` of its answer. The gaps themselves, which a
reader sees, have quantiles of their own. A failed request has no latencies, and its tokens do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.core import SpeculationStats
from paceline.tools.statistics import Acceptance, Quantiles, acceptance, quantiles

_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of one request. Times are seconds from the start of the level.

    Attributes:
        due_s: when it was to be sent.
        pieces_s: when each piece of text came; a piece holds any number of tokens.
        end_s: when its last byte came, or it failed.
        error: the kind of failure, "" for none; `message` says more.
    """

    prompt: str
    category: str
    due_s: float
    end_s: float
    pieces_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    finish_reason: str = ""
    speculation: SpeculationStats | None = None
    error: str = ""
    message: str = ""

    @property
    def latency_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def first_token_s(self) -> float:
        """An answer without text had its first token, the one that ended it, at its end."""
        return (self.pieces_s[0] if self.pieces_s else self.end_s) - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.pieces_s)]

    @property
    def tokens_per_gap(self) -> float:
        """Tokens after the first, per gap; 0 where there is none of either."""
        gaps = len(self.pieces_s) - 1
        return max(self.completion_tokens - 1, 0) / gaps if gaps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One server at one level.

    Attributes:
        seconds: from the first request's moment to the last answer's end.
        errors: failed requests by kind.
        in_flight: requests being served, averaged over that time.
        inter_token_s: per token after the first; `gap_s` per piece of text after the first.
        acceptance: what speculation did, None where the server does not tell.
    """

    requests: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    in_flight: float
    first_token_s: Quantiles | None
    inter_token_s: Quantiles | None
    gap_s: Quantiles | None
    latency_s: Quantiles | None
    acceptance: Acceptance | None


def figures(replies: Sequence[Reply]) -> LoadFigures:
    """Sum up one level; totals over totals, quantiles over requests, tokens or gaps."""
    good = [r for r in replies if not r.error]
    seconds = max((r.end_s for r in replies), default=0.0) - min((r.due_s for r in replies), default=0.0)
    tokens = sum(r.completion_tokens for r in good)
    speculation = [r.speculation for r in good if r.speculation is not None]
    return LoadFigures(
        requests=len(replies),
        errors=dict(Counter(r.error for r in replies if r.error)),
        seconds=seconds,
        prompt_tokens=sum(r.prompt_tokens for r in good),
        completion_tokens=tokens,
        output_tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        requests_per_s=len(good) / seconds if seconds > 0 else 0.0,
        in_flight=sum(r.latency_s for r in replies) / seconds if seconds > 0 else 0.0,
        first_token_s=quantiles([r.first_token_s for r in good]),
        inter_token_s=inter_token(good),
        gap_s=quantiles([gap for r in good for gap in r.gaps_s]),
        latency_s=quantiles([r.latency_s for r in good]),
        acceptance=acceptance(speculation) if speculation else None,
    )


def inter_token(replies: Sequence[Reply]) -> Quantiles | None:
    """Quantiles over tokens: each token after an answer's first counts once, with its share of its gap."""
    shares, weights = [], []
    for reply in replies:
        if per_gap := reply.tokens_per_gap:
            shares += [gap / per_gap for gap in reply.gaps_s]
            weights += [per_gap] * len(reply.gaps_s)
    if not shares:
        return None
    found = np.quantile(np.asarray(shares), _QUANTILES, weights=np.asarray(weights), method="inverted_cdf")
    return Quantiles(*found.tolist())


def written(found: Quantiles | None, scale: float, digits: int) -> str:
    """Three quantiles as reports show them."""
    if found is None:
        return ""
    return " / ".join(f"{value * scale:.{digits}f}" for value in (found.p50, found.p90, found.p99))


def differing(replies: Sequence[Reply]) -> list[str]:
    """Prompts that got more than one text; without errors, and for equal sampling, there should be none."""
    texts: dict[str, set[str]] = {}
    for reply in replies:
        if not reply.error:
            texts.setdefault(reply.prompt, set()).add(reply.text)
    return [prompt for prompt, some in texts.items() if len(some) > 1]
