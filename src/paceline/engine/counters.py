"""What an engine did since it was made. Written by the thread that steps, read by any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core import CLAIM_CLASSES, Claims, DrafterStats, Outcome, SpeculationStats


@dataclass(slots=True)
class Counters:
    """Numbers that only grow.

    Attributes:
        prompt_tokens: of the requests that started; each was looked up in the cache.
        cached_tokens: those that were found there.
        generated_tokens: committed.
        passes: of the target, prefill included.
        preemptions: requests sent back to the queue.
        speculation: what drafts brought, over all requests.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    preemptions: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens


def record(stats: Sequence[SpeculationStats], outcome: Outcome) -> None:
    """Count a decode pass of one request in each of `stats`."""
    for each in stats:
        each.passes += 1
        each.committed += len(outcome.committed)
        if len(outcome.draft):
            _record_draft(each, outcome)


def _record_draft(stats: SpeculationStats, outcome: Outcome) -> None:
    stats.drafts += 1
    stats.drafted += len(outcome.draft)
    stats.accepted += len(outcome.path)
    positions = stats.accepted_per_position
    positions += [0] * (len(outcome.path) - len(positions))
    for i in range(len(outcome.path)):
        positions[i] += 1
    for source in outcome.draft.sources:
        stats.by_drafter.setdefault(source, DrafterStats()).drafted += 1
    for node in outcome.path:
        stats.by_drafter[outcome.draft.sources[node]].accepted += 1
    chances = outcome.draft.chances.tolist()
    for node, right in outcome.tested():
        claims = stats.by_drafter[outcome.draft.sources[node]].claims
        its = claims.setdefault(min(int(chances[node] * CLAIM_CLASSES), CLAIM_CLASSES - 1), Claims())
        its.decided += 1
        its.expected += chances[node]
        its.right += right
