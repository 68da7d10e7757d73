"""Writes `tests/sampling/recorded/processors.json`: what transformers' logits processors compute.

python -m oracles.record_sampling     (in tests/, with the oracle environment)
"""

from __future__ import annotations

import json
from pathlib import Path

from oracles.sampling_references import CASES, OUTPUT, PROMPT, logits, probabilities

_RECORDED = Path(__file__).parents[1] / "sampling" / "recorded" / "processors.json"


def main() -> None:
    cases = [
        {"name": name, "params": params, "probabilities": [round(p, 9) for p in probabilities(params)]}
        for name, params in CASES.items()
    ]
    _RECORDED.parent.mkdir(exist_ok=True)
    recorded = {"logits": logits(), "prompt": PROMPT, "output": OUTPUT, "cases": cases}
    _RECORDED.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
