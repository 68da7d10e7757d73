"""What an engine did since it was made. Written by the thread that steps, read by any."""

from __future__ import annotations

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
        speculation: what drafts brought, over all requests; without `claims`.
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


def record(stats: SpeculationStats, totals: SpeculationStats, outcome: Outcome) -> None:
    """Count a decode pass of one request, in its own numbers and in the engine's.

    How good the chances were is kept for each request only.
    """
    for each in (stats, totals):
        each.passes += 1
        each.committed += len(outcome.committed)
        if len(outcome.draft):
            _record_draft(each, outcome)
    if len(outcome.draft):
        _record_claims(stats, outcome)


def _record_draft(stats: SpeculationStats, outcome: Outcome) -> None:
    stats.drafts += 1
    stats.drafted += len(outcome.draft)
    stats.accepted += len(outcome.path)
    positions = stats.accepted_per_position
    positions += [0] * (len(outcome.path) - len(positions))
    for i in range(len(outcome.path)):
        positions[i] += 1
    by_drafter = stats.by_drafter
    for source in outcome.draft.sources:
        if source not in by_drafter:
            by_drafter[source] = DrafterStats()
        by_drafter[source].drafted += 1
    for node in outcome.path:
        by_drafter[outcome.draft.sources[node]].accepted += 1


def _record_claims(stats: SpeculationStats, outcome: Outcome) -> None:
    """Every node that the target decided on, by its chance."""
    draft = outcome.draft
    for node, right in outcome.tested:
        chance = draft.chances[node]
        claims = stats.by_drafter[draft.sources[node]].claims
        place = min(int(chance * CLAIM_CLASSES), CLAIM_CLASSES - 1)
        its = claims.get(place)
        if its is None:
            its = claims[place] = Claims()
        its.decided += 1
        its.expected += chance
        its.right += right
