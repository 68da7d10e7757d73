"""Greedy texts of real models, token by token, against llama.cpp on the same file.

Both round activations to int8, each in its own way, so near ties fall either way: of twenty texts some part
within 64 tokens (`benchmarks/agreement.py` counts them, and tells how far each is from exact arithmetic).
What is held here is that they part nowhere else.
The demo model is always compared; ORACLE_MODELS names a folder that may hold more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from oracles.text_references import llama_server
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.weights.gguf import GGUFFile
from support.passes import Pass, greedy, table_of

pytestmark = pytest.mark.oracle

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
COUNT = 64
LONGEST = 1024


def test_demo_model(smollm2_path: Path) -> None:
    _compare(smollm2_path)


@pytest.mark.parametrize("name", ["gemma3", "qwen", "qwen-q4_0"])
def test_other_models(name: str) -> None:
    path = Path(os.environ.get("ORACLE_MODELS", "")) / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"ORACLE_MODELS names no folder with {name}.gguf")
    _compare(path)


def _compare(path: Path) -> None:
    file = GGUFFile.open(path)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    target = NativeTarget.load(file, max_model_len=LONGEST)
    lines = PROMPTS.read_text().splitlines()
    prompts = [tokenizer.encode(json.loads(line)["prompt"])[: LONGEST - COUNT - 1] for line in lines]
    gaps = []
    with llama_server(path, LONGEST) as server:
        for prompt in prompts:
            theirs = server.greedy(prompt, COUNT)
            ours = greedy(target, prompt, len(theirs))
            split = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if split is not None:
                gaps.append(_gap(target, [*prompt, *ours[:split]]))
    assert len(gaps) <= len(prompts) * 2 / 3
    assert np.median(gaps or [0.0]) < 0.2
    assert max(gaps, default=0.0) < 0.6


def _gap(target: NativeTarget, text: list[int]) -> float:
    """By how much the likeliest token leads after a text."""
    one = Pass(target, [table_of(target)])
    one.chain(text, 0)
    second, first = np.sort(one.logits([len(text) - 1])[0])[-2:]
    return float(first - second)
