"""Whole tiny models against a float64 decoder in numpy that shares no code with ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core import Floats
from paceline.models.target import NativeTarget
from paceline.native import instruction_sets
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType
from support.passes import greedy, random_tokens, run_in_chunks, table_of
from support.reference_decoder import ReferenceDecoder
from support.tiny_models import TinyModel
from support.zoo import scaling

K = TensorType

EXACT = {
    "one head": TinyModel(),
    "many heads": TinyModel(heads=6, kv_heads=2, head_dim=32, width=96, hidden=160, layers=3),
    "key-value heads for all": TinyModel(heads=4, kv_heads=4, head_dim=16, width=64),
    "heads wider than the model": TinyModel(heads=4, kv_heads=1, head_dim=80, width=64, hidden=96),
    "untied": TinyModel(tied=False, vocab=100),
    "qwen2": TinyModel(architecture="qwen2", biases=True, heads=7, kv_heads=1, head_dim=64, width=128),
    "qwen2 without biases": TinyModel(architecture="qwen2", heads=2, head_dim=32, width=64),
    "llama with biases": TinyModel(biases=True),
    "another base": TinyModel(rope_base=1e6, head_dim=64, width=128),
    "linear scaling": TinyModel(scaling=scaling("linear", 4.0)),
    "llama 3 factors": TinyModel(rope_factors=(1.0, 1.0, 1.7, 2.5, 4.0, 8.0, 8.0, 8.0)),
    "partial rotary": TinyModel(head_dim=64, width=64, scaling={"rope.dimension_count": 32}),
    "partial rotary, halves": TinyModel(
        architecture="qwen2", head_dim=64, width=64, scaling={"rope.dimension_count": 16}
    ),
    "dynamic scaling": TinyModel(
        head_dim=32, width=64, scaling=scaling("dynamic", 4.0, original=256), context=2048
    ),
    "dynamic scaling of a short context": TinyModel(
        head_dim=32, width=64, scaling=scaling("dynamic", 4.0, original=1024), context=2048
    ),
    "yarn": TinyModel(head_dim=64, width=64, scaling=scaling("yarn", 8.0, original=64)),
    "yarn of its own magnitude": TinyModel(
        architecture="qwen2",
        head_dim=64,
        width=64,
        scaling={**scaling("yarn", 4.0, original=128), "rope.scaling.attn_factor": 0.7},
    ),
    "window": TinyModel(head_dim=32, width=64, layers=3, scaling={"attention.sliding_window": 20}),
    "window in two of three layers": TinyModel(
        layers=3, scaling={"attention.sliding_window": 20, "attention.sliding_window_pattern": 3}
    ),
    "qwen3": TinyModel(architecture="qwen3", heads=4, kv_heads=2, head_dim=64, width=96, rope_base=1e6),
    "phi3": TinyModel(architecture="phi3", heads=4, kv_heads=2, head_dim=32, width=96, hidden=96),
    "phi3 with long rope, a window and partial rotary": TinyModel(
        architecture="phi3",
        head_dim=32,
        width=64,
        long_factors=tuple(1.0 + i / 2 for i in range(12)),
        tied=False,
        scaling={
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": 1.19,
            "attention.sliding_window": 33,
        },
    ),
    "phi3 with long rope in a short context": TinyModel(
        architecture="phi3",
        head_dim=32,
        width=64,
        long_factors=tuple(1.0 + i / 2 for i in range(16)),
        scaling={"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.19},
    ),
    "gemma3": TinyModel(
        architecture="gemma3",
        heads=4,
        kv_heads=1,
        head_dim=64,
        width=96,
        layers=7,
        rope_base=1e6,
        scaling={"attention.sliding_window": 20, **scaling("linear", 8.0)},
    ),
    "gemma3 of another scale": TinyModel(
        architecture="gemma3",
        head_dim=32,
        scaling={"attention.sliding_window": 9, "attention.scale": 0.11, "final_logit_softcapping": 3.0},
    ),
    "gemma2": TinyModel(
        architecture="gemma2",
        heads=4,
        kv_heads=2,
        head_dim=48,
        width=64,
        layers=3,
        scaling={
            "attention.sliding_window": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "qwen3moe": TinyModel(
        architecture="qwen3moe", heads=4, kv_heads=2, head_dim=32, width=64, hidden=96, experts=5
    ),
    "qwen3moe, shares as they are": TinyModel(
        architecture="qwen3moe", head_dim=32, experts=3, scaling={"expert_weights_norm": False}
    ),
    "mixtral": TinyModel(experts=4),
    "float16": TinyModel(kind=K.F16, head_dim=64, width=64),
}

CONTEXT = 1024
ROUNDING = [kind for kind in TensorType if kind not in (K.F32, K.F16)]


def load(path: Path, isa: str | None = None) -> NativeTarget:
    return NativeTarget.load(GGUFFile.open(path), isa=isa, threads=2, max_model_len=CONTEXT)


def logits_of(target: NativeTarget, tokens: list[int]) -> Floats:
    return run_in_chunks(target, tokens, [30, 1, 5, 512], table_of(target))


@pytest.mark.parametrize("name", EXACT)
def test_floating_point_models_match(name: str, tmp_path: Path) -> None:
    path = EXACT[name].write(tmp_path / "model.gguf")
    tokens = random_tokens(70, EXACT[name].vocab)
    got = logits_of(load(path), tokens)
    expected = ReferenceDecoder(path, as_kernels=True).logits(tokens, longest=CONTEXT)
    # A key or value on the edge between two halves may go either way.
    assert rms(got - expected) < 1e-4 * expected.std()
    assert np.abs(got - expected).max() < 1e-3 * expected.std()
    # Against plain float64, what is left is the cache: keys and values in half precision.
    plain = ReferenceDecoder(path).logits(tokens, longest=CONTEXT)
    assert np.abs(got - plain).max() < 5e-3 * plain.std()


@pytest.mark.parametrize("name", ["one head", "qwen2", "gemma3", "gemma2", "window"])
def test_long_contexts_match(name: str, tmp_path: Path) -> None:
    path = EXACT[name].write(tmp_path / "model.gguf")
    tokens = random_tokens(600, EXACT[name].vocab)
    expected = ReferenceDecoder(path, as_kernels=True).logits(tokens, longest=CONTEXT)
    assert rms(logits_of(load(path), tokens) - expected) < 1e-4 * expected.std()


@pytest.mark.parametrize("kind", ROUNDING, ids=lambda k: k.name)
def test_models_match_when_the_reference_rounds_alike(kind: TensorType, tmp_path: Path) -> None:
    model = TinyModel(
        kind=kind, layers=1, width=256, hidden=512, heads=4, kv_heads=2, head_dim=64, biases=True
    )
    path = model.write(tmp_path / "model.gguf")
    tokens = random_tokens(24, model.vocab)
    got = logits_of(load(path), tokens)
    plain = ReferenceDecoder(path).logits(tokens)
    alike = ReferenceDecoder(path, as_kernels=True).logits(tokens)
    # A value on the edge between two roundings may go either way; most rows have none such.
    assert np.median(np.abs(got - alike).max(axis=1)) < 1e-4 * plain.std()
    assert rms(got - plain) < 3e-2 * plain.std()


def rms(x: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(x * x)))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("name", ["many heads", "qwen2", "qwen3", "gemma3", "gemma2", "phi3", "qwen3moe"])
def test_greedy_texts_are_equal(name: str, isa: str, tmp_path: Path) -> None:
    path = EXACT[name].write(tmp_path / "model.gguf")
    prompt = random_tokens(9, EXACT[name].vocab, seed=2)
    assert greedy(load(path, isa), prompt, 24) == ReferenceDecoder(path).greedy(prompt, 24)
