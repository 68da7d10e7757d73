"""What an answer tells about itself: usage, timings, and what speculation did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core import Completion, SpeculationStats


def usage(completions: Sequence[Completion], *, prompts: int, predicted: bool) -> dict[str, Any]:
    """OpenAI's `usage`.

    Args:
        completions: of all prompts, the n of each prompt together.
        prompts: how many prompts there were; each is counted once.
        predicted: the client gave a prediction, which the two prediction counts are about.
    """
    firsts = completions[:: max(1, len(completions) // max(1, prompts))]
    prompt_tokens = sum(c.prompt_tokens for c in firsts)
    written = sum(len(c.tokens) for c in completions)
    ours = [c.speculation.by_drafter.get("prediction") for c in completions] if predicted else []
    accepted = sum(stats.accepted for stats in ours if stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(stats.drafted for stats in ours if stats) - accepted,
        },
    }


def timings(completions: Sequence[Completion], *, prompts: int) -> dict[str, Any]:
    """llama-server's `timings`. Decoding made all tokens but each text's first, which prefill yields."""
    firsts = completions[:: max(1, len(completions) // max(1, prompts))]
    prompt_n = sum(c.prompt_tokens - c.cached_tokens for c in firsts)
    prompt_ms = sum(c.timings.prefill_s for c in firsts) * 1e3
    predicted_n = sum(len(c.tokens) for c in completions)
    decoded = sum(max(len(c.tokens) - 1, 0) for c in completions)
    predicted_ms = max((c.timings.decode_s for c in completions), default=0.0) * 1e3
    return {
        "cache_n": sum(c.cached_tokens for c in firsts),
        "prompt_n": prompt_n,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(prompt_n * 1e3, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": _ratio(predicted_ms, decoded),
        "predicted_per_second": _ratio(decoded * 1e3, predicted_ms),
        "draft_n": sum(c.speculation.drafted for c in completions),
        "draft_n_accepted": sum(c.speculation.accepted for c in completions),
    }


def speculative_decoding(stats: Sequence[SpeculationStats]) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding`, in its definitions, and ours behind it.

    vLLM's mean acceptance length is over steps that drafted; `tokens_per_pass` is over all decode passes.
    """
    drafts = sum(s.drafts for s in stats)
    drafted = sum(s.drafted for s in stats)
    accepted = sum(s.accepted for s in stats)
    passes = sum(s.passes for s in stats)
    by_drafter: dict[str, dict[str, int]] = {}
    for one in stats:
        for name, found in one.by_drafter.items():
            mine = by_drafter.setdefault(name, {"drafted": 0, "accepted": 0})
            mine["drafted"] += found.drafted
            mine["accepted"] += found.accepted
    return {
        "mean_acceptance_length": _ratio(drafts + accepted, drafts) or 1.0,
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": histogram(stats),
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "passes": passes,
        "tokens_per_pass": _ratio(sum(s.committed for s in stats), passes) or 1.0,
        "by_drafter": by_drafter,
        "drafters": list(dict.fromkeys(name for one in stats for name in one.drafters)),
        "off_reason": None if drafted else next((s.off_reason for s in stats if s.off_reason), None),
    }


def histogram(stats: Sequence[SpeculationStats]) -> list[int]:
    """How many drafting steps kept exactly 0, 1, 2, ... draft tokens."""
    longest = max((len(s.accepted_per_position) for s in stats), default=0)
    reached = [sum(s.drafts for s in stats)] + [0] * (longest + 1)
    for one in stats:
        for position, count in enumerate(one.accepted_per_position):
            reached[position + 1] += count
    return [reached[i] - reached[i + 1] for i in range(longest + 1)]


def decode_rate(completions: Sequence[Completion]) -> float:
    """Tokens per second while decoding; 0 when nothing was decoded."""
    return float(timings(completions, prompts=1)["predicted_per_second"])


def _ratio(over: float, under: float) -> float:
    return round(over / under, 6) if under else 0.0
