"""Whole models against transformers in float32 on the same dequantised weights.

The demo model is always compared; ORACLE_MODELS names a folder that may also hold qwen.gguf
(Qwen2.5-Coder-0.5B-Instruct).
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from oracles.model_references import LLAMA_3, TransformersModel, llama_3_factors
from oracles.record_models import GREEDY, prompts
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.weights.gguf import GGUFFile
from support.passes import greedy, random_tokens, run_in_chunks, table_of
from support.reference_decoder import ReferenceDecoder
from support.tiny_models import TinyModel

pytestmark = pytest.mark.oracle


def scaling(kind: str, factor: float, original: int | None = None) -> dict[str, Any]:
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    return keys if original is None else {**keys, "rope.scaling.original_context_length": original}


TINY = {
    "llama": TinyModel(heads=4, kv_heads=2, head_dim=32, width=128, hidden=160),
    "llama, untied": TinyModel(heads=4, kv_heads=2, head_dim=16, width=64, tied=False),
    "llama, heads wider than the model": TinyModel(heads=4, kv_heads=2, head_dim=64, width=96),
    "llama, linear scaling": TinyModel(head_dim=32, width=64, scaling=scaling("linear", 4.0)),
    "llama, dynamic scaling": TinyModel(head_dim=32, width=64, scaling=scaling("dynamic", 4.0, 128)),
    "llama, yarn": TinyModel(head_dim=64, width=128, scaling=scaling("yarn", 8.0, 64)),
    "mistral": TinyModel(
        heads=4, kv_heads=2, head_dim=32, width=128, scaling={"attention.sliding_window": 50}
    ),
    "qwen2": TinyModel(
        architecture="qwen2", biases=True, heads=7, kv_heads=1, head_dim=32, width=224, rope_base=1e6
    ),
    "qwen2, yarn": TinyModel(
        architecture="qwen2",
        biases=True,
        head_dim=64,
        width=128,
        scaling={**scaling("yarn", 4.0, 128), "rope.scaling.attn_factor": 0.8},
    ),
    "qwen3": TinyModel(architecture="qwen3", heads=4, kv_heads=2, head_dim=64, width=128, rope_base=1e6),
    "qwen3moe": TinyModel(architecture="qwen3moe", heads=4, kv_heads=2, head_dim=32, width=128, experts=6),
    "qwen3moe, shares as they are": TinyModel(
        architecture="qwen3moe", head_dim=32, width=64, experts=4, scaling={"expert_weights_norm": False}
    ),
    "phi3": TinyModel(architecture="phi3", heads=4, kv_heads=2, head_dim=32, width=128),
    "phi3, long rope": TinyModel(
        architecture="phi3",
        heads=4,
        kv_heads=2,
        head_dim=32,
        width=128,
        long_factors=tuple(1.0 + i / 2 for i in range(12)),
        scaling={
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": 1.19,
            "attention.sliding_window": 70,
        },
    ),
    "gemma2": TinyModel(
        architecture="gemma2",
        heads=4,
        kv_heads=2,
        head_dim=32,
        width=128,
        layers=4,
        scaling={
            "attention.sliding_window": 50,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": TinyModel(
        architecture="gemma3",
        heads=4,
        head_dim=64,
        width=128,
        layers=7,
        rope_base=1e6,
        scaling={"attention.sliding_window": 50, **scaling("linear", 8.0)},
    ),
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, tmp_path: Path) -> None:
    path = TINY[name].write(tmp_path / "model.gguf")
    _compare(path, TransformersModel(path), TINY[name].vocab)


def test_llama_3_scaling(tmp_path: Path) -> None:
    """The factors that a converter writes mean what transformers computes from the parameters."""
    model = TinyModel(head_dim=64, width=128, rope_factors=llama_3_factors(64, 10000.0))
    assert model.rope_factors is not None
    assert model.rope_factors[0] == pytest.approx(1.0)
    assert model.rope_factors[-1] == pytest.approx(8.0)
    path = model.write(tmp_path / "model.gguf")
    _compare(path, TransformersModel(path, LLAMA_3), model.vocab)


def _compare(path: Path, reference: TransformersModel, vocab: int) -> None:
    """Both our kernels and the tests' own reference decoder."""
    tokens = random_tokens(300, vocab)
    expected = reference.logits(tokens)
    assert expected.std() > 0.3
    assert np.abs(ReferenceDecoder(path).logits(tokens) - expected).max() < 1e-4
    target = NativeTarget.load(GGUFFile.open(path), threads=2, max_model_len=len(tokens))
    got = run_in_chunks(target, tokens, [150, 1, 8], table_of(target))
    # The cache holds keys and values in half precision, which is most of the distance.
    assert np.abs(got - expected).max() < 5e-3
    assert np.sqrt(np.mean((got - expected) ** 2)) < 1e-3
    assert greedy(target, tokens[:200], 24) == reference.greedy(tokens[:200], 24)


def test_recorded_texts_are_those_of_transformers(smollm2_path: Path) -> None:
    recorded = json.loads(GREEDY.read_text())
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(smollm2_path).metadata)
    reference = TransformersModel(smollm2_path)
    assert sum(len(entry["output"]) for entry in recorded.values()) > 100
    for name, entry in recorded.items():
        assert entry["prompt"] == tokenizer.encode(prompts()[name])
        assert reference.greedy(entry["prompt"], len(entry["output"])) == entry["output"]


def test_likelihood_of_a_text(smollm2_path: Path) -> None:
    """Within a hundredth of a nat per token; benchmarks/quality.py measures more models and a longer text."""
    got = _quality().compare(smollm2_path, 4096)
    assert abs(got["difference"]) < 0.01
    assert got["divergence"] < 0.02
    assert got["same_argmax"] > 0.9


def test_likelihood_of_a_text_on_qwen() -> None:
    path = Path(os.environ.get("ORACLE_MODELS", "")) / "qwen.gguf"
    if not path.is_file():
        pytest.skip("ORACLE_MODELS names no folder with qwen.gguf")
    got = _quality().compare(path, 2048)
    assert abs(got["difference"]) < 0.01
    assert got["divergence"] < 0.01


def _quality() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
