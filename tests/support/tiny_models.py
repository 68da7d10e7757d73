"""Random model files of any geometry and weight type, small enough to run in microseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.weights.quants import TensorType
from support.gguf_writer import Tensor, write_gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What a random decoder file holds.

    Attributes:
        kind: type of every matrix; norms and biases are F32.
        kinds: exceptions by the last part of a tensor's name, such as "attn_v".
        scaling: metadata keys under the architecture, such as rope scaling.
        rope_factors: contents of rope_freqs.weight, if the file is to have one.
    """

    architecture: str = "llama"
    kind: TensorType = TensorType.F32
    kinds: Mapping[str, TensorType] = field(default_factory=dict)
    vocab: int = 61
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    width: int = 32
    hidden: int = 64
    context: int = 2048
    tied: bool = True
    biases: bool = False
    rope_base: float = 10000.0
    scaling: Mapping[str, Any] = field(default_factory=dict)
    rope_factors: tuple[float, ...] | None = None
    seed: int = 0

    def metadata(self) -> dict[str, Any]:
        plain = {
            "context_length": self.context,
            "embedding_length": self.width,
            "block_count": self.layers,
            "feed_forward_length": self.hidden,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": self.rope_base,
        }
        named = {f"{self.architecture}.{key}": value for key, value in {**plain, **self.scaling}.items()}
        return {"general.architecture": self.architecture, **named}

    def tensors(self) -> dict[str, Tensor]:
        rng = np.random.default_rng(self.seed)
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: dict[str, Tensor] = {}

        def matrix(name: str, rows: int, cols: int) -> None:
            kind = self.kinds.get(name.split(".")[-1], self.kind)
            out[f"{name}.weight"] = Tensor.random(kind, (rows, cols), rng, scale=1.5 / math.sqrt(cols))

        def norm(name: str) -> None:
            out[f"{name}.weight"] = Tensor.of(rng.uniform(0.5, 1.5, self.width))

        matrix("token_embd", self.vocab, self.width)
        if self.rope_factors is not None:
            out["rope_freqs.weight"] = Tensor.of(np.asarray(self.rope_factors))
        for i in range(self.layers):
            norm(f"blk.{i}.attn_norm")
            for name, size in (("attn_q", inner), ("attn_k", kv), ("attn_v", kv)):
                matrix(f"blk.{i}.{name}", size, self.width)
                if self.biases:
                    out[f"blk.{i}.{name}.bias"] = Tensor.of(rng.uniform(-1, 1, size))
            matrix(f"blk.{i}.attn_output", self.width, inner)
            norm(f"blk.{i}.ffn_norm")
            matrix(f"blk.{i}.ffn_gate", self.hidden, self.width)
            matrix(f"blk.{i}.ffn_up", self.hidden, self.width)
            matrix(f"blk.{i}.ffn_down", self.width, self.hidden)
        norm("output_norm")
        if not self.tied:
            matrix("output", self.vocab, self.width)
        return out

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        return write_gguf(path, self.metadata(), self.tensors())
