"""A tiny model of every architecture and variant of rope, for comparisons with transformers."""

from __future__ import annotations

from typing import Any

from support.tiny_models import TinyModel

LENGTH = 300
"""Tokens that the models are compared on: beyond every window and every context that ropes stretch."""


def scaling(kind: str, factor: float, original: int | None = None) -> dict[str, Any]:
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    return keys if original is None else {**keys, "rope.scaling.original_context_length": original}


ZOO = {
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
