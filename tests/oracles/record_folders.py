"""Records logits and long greedy texts of random folders as transformers in float32 computes them.

    PYTHONPATH=tests python -m oracles.record_folders

Run in the oracle environment. The seed of each folder is the first whose text has no near tie in it: half
precision in our cache decides those by chance.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from oracles.folder_references import FOLDERS, TransformersFolder
from support.folders import TinyFolder
from support.passes import random_tokens

RECORDED = Path(__file__).parents[1] / "models" / "recorded" / "folders.json"
TEXT = 300
POSITIONS = [0, 60, 70, 199]
EVERY = 8
_NEAR = 2e-4
_SEEDS = 200


def prompt(folder: TinyFolder) -> list[int]:
    return random_tokens(200, folder.config()["vocab_size"])


def record(folder: TinyFolder) -> dict[str, Any]:
    """The first seed without a near tie, and what transformers makes of it."""
    for seed in range(_SEEDS):
        with tempfile.TemporaryDirectory() as place:
            reference = TransformersFolder(replace(folder, seed=seed).write(Path(place)))
            text, gap = reference.greedy(prompt(folder)[:16], TEXT)
            if gap < _NEAR:
                continue
            logits = reference.logits(prompt(folder))[POSITIONS, ::EVERY]
            return {"seed": seed, "text": text, "logits": [[round(float(x), 6) for x in r] for r in logits]}
    raise AssertionError(f"no seed up to {_SEEDS} avoids near ties")


def main() -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(record(folder))}" for name, folder in FOLDERS.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
