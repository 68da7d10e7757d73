"""Records what public code drafts with random checkpoints: tokens, logits, confidences.

    PYTHONPATH=tests ORACLE_SOURCES=/folder/with/clones python -m oracles.record_heads

Run in the oracle environment. The clones are github.com/deepseek-ai/DeepSpec at afdfa7c and
github.com/SafeAILab/EAGLE at cb7e084. The seed of each checkpoint is the first whose drafts have no near tie:
half precision in our cache decides those by chance.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oracles import block_references, head_references
from oracles.head_cases import CASES, TARGET, PublicCase
from oracles.public_code import PublicDrafter, PublicTarget
from support.passes import random_tokens
from support.public_rounds import Round
from support.tiny_heads import Array

RECORDED = Path(__file__).parents[1] / "drafters" / "recorded" / "public_heads.json"
LENGTHS = (2, 3, 31, 38)
EVERY = 16
_NEAR = 2e-3
_SEEDS = 400


def texts() -> list[list[int]]:
    whole = random_tokens(max(LENGTHS), 250)
    return [whole[:length] for length in LENGTHS]


def opened(case: PublicCase, path: Path, target: PublicTarget) -> PublicDrafter:
    """A case's checkpoint in the hands of who runs it."""
    module = head_references if hasattr(head_references, case.by) else block_references
    found: PublicDrafter = getattr(module, case.by)(path, target)
    return found


def record(case: PublicCase, target: PublicTarget) -> dict[str, Any]:
    """The first seed without a near tie, and what was drafted."""
    for seed in range(_SEEDS):
        with tempfile.TemporaryDirectory() as place:
            path = replace(case.head, seed=seed).write(Path(place) / "head")
            rounds = opened(case, path, target).play(texts(), case.count)
        if min(gap(its.logits) for its in rounds) >= _NEAR:
            return {"seed": seed, "text": rounds[-1].text, "rounds": [_entry(its) for its in rounds]}
    raise AssertionError(f"no seed up to {_SEEDS} avoids near ties")


def gap(logits: Array) -> float:
    """The smallest distance of a row's two largest logits, relative to the largest of all."""
    best = np.sort(logits, axis=1)[:, -2:]
    return float((best[:, 1] - best[:, 0]).min() / np.abs(logits).max())


def _entry(its: Round) -> dict[str, Any]:
    return {
        "length": len(its.text),
        "drafts": its.drafts,
        "largest": _rounded(np.abs(its.logits).max()),
        "logits": [[_rounded(x) for x in row[::EVERY]] for row in its.logits],
        "sure": [_rounded(x) for x in its.sure],
    }


def _rounded(x: float) -> float:
    return float(f"{x:.5g}")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        target = PublicTarget(TARGET.write(Path(place) / "target"))
        lines = [f"  {json.dumps(name)}: {json.dumps(record(case, target))}" for name, case in CASES.items()]
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
