"""Every architecture and variant of rope against what transformers computed; see oracles/record_models.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.models.target import NativeTarget
from paceline.weights.gguf import GGUFFile
from support.passes import greedy, random_tokens, run_in_chunks, table_of
from support.zoo import LENGTH, ZOO

RECORDED = json.loads((Path(__file__).parent / "recorded" / "tiny_models.json").read_text())


@pytest.mark.parametrize("name", ZOO)
def test_recorded_values(name: str, tmp_path: Path) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    # Some ropes adapt to the longest text there can be; transformers saw one of this length.
    target = NativeTarget.load(GGUFFile.open(path), threads=2, max_model_len=LENGTH)
    tokens = random_tokens(LENGTH, ZOO[name].vocab)
    got = run_in_chunks(target, tokens, [LENGTH - 1, 1], table_of(target))[-1]
    # What is left is the cache: keys and values in half precision.
    assert np.abs(got - RECORDED[name]["logits"]).max() < 5e-3
    if "dynamic" in name:
        return  # transformers turns earlier keys otherwise than later ones once a text grows
    longer = NativeTarget.load(GGUFFile.open(path), threads=2, max_model_len=LENGTH + 32)
    assert greedy(longer, tokens, 24) == RECORDED[name]["greedy"]
