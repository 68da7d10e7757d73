"""A completion as the JSON object and as the line on stderr."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.core import Completion


def as_object(completion: Completion, model: str, load_s: float) -> dict[str, Any]:
    """The object that `paceline generate --json` prints."""
    c, s = completion, completion.speculation
    return {
        "model": model,
        "text": c.text,
        "tokens": c.tokens,
        "token_sources": c.token_sources,
        "finish_reason": c.finish_reason,
        "stop_reason": c.stop_reason,
        "seed": c.seed,
        "usage": {
            "prompt_tokens": c.prompt_tokens,
            "completion_tokens": len(c.tokens),
            "cached_tokens": c.cached_tokens,
        },
        "timings": {"load_s": load_s} | asdict(c.timings),
        "speculation": asdict(s)
        | {"mean_acceptance_length": s.mean_acceptance_length, "acceptance_rate": s.acceptance_rate},
        "logprobs": None if c.logprobs is None else [asdict(p) for p in c.logprobs],
    }


def in_words(completion: Completion) -> str:
    """One line: how much, how fast, and what speculation did."""
    c, s = completion, completion.speculation
    parts = [f"{c.prompt_tokens} + {len(c.tokens)} tokens"]
    if c.timings.decode_s > 0:
        parts.append(f"{decode_rate(c):.1f} tokens/s")
    if s.drafted:
        by = ", ".join(f"{name} {d.accepted}/{d.drafted}" for name, d in s.by_drafter.items())
        parts.append(f"{s.mean_acceptance_length:.2f} tokens per pass")
        parts.append(f"accepted {by}")
    elif s.off_reason:
        parts.append(f"no speculation: {s.off_reason}")
    return f"[{' · '.join(parts)} · {c.finish_reason}]"


def decode_rate(completion: Completion) -> float:
    """Tokens per second after the first token; 0 when there were none."""
    seconds = completion.timings.decode_s
    return max(len(completion.tokens) - 1, 0) / seconds if seconds > 0 else 0.0
