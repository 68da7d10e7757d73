"""Records what llama.cpp drafts with random GGUF heads and block drafters.

    PYTHONPATH=tests ORACLE_LLAMA=/folder/with/llama-server python -m oracles.record_llama_heads

The seed of each file is the first whose drafts have no near tie: half precision in our cache decides those by
chance.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from oracles.llama_heads import CASES, LlamaCase, played

RECORDED = Path(__file__).parents[1] / "drafters" / "recorded" / "llama_heads.json"
_NEAR = 0.004
_SEEDS = 50


def record(case: LlamaCase) -> dict[str, Any]:
    for seed in range(_SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            text, told = played(case, Path(folder), seed)
        if min(place[0][1] - place[1][1] for its in told for place in its.places) >= _NEAR:
            rounds = [{"length": its.length, "places": its.places} for its in told]
            return {"seed": seed, "text": text, "rounds": rounds}
    raise AssertionError(f"no seed up to {_SEEDS} avoids near ties")


def main() -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(record(case))}" for name, case in CASES.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
