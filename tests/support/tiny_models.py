"""Random model files of any geometry and weight type, small enough to run in microseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
        long_factors: those of rope_factors_long.weight; rope_factors_short.weight then is all ones.
        experts: networks per layer, of which two are used; 0 means one that is.
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
    long_factors: tuple[float, ...] | None = None
    experts: int = 0
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
        if self.experts:
            plain |= {"expert_count": self.experts, "expert_used_count": 2}
        named = {f"{self.architecture}.{key}": value for key, value in {**plain, **self.scaling}.items()}
        return {"general.architecture": self.architecture, **named}

    def tensors(self) -> dict[str, Tensor]:
        rng = np.random.default_rng(self.seed)
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: dict[str, Tensor] = {}

        def matrix(name: str, *shape: int) -> None:
            kind = self.kinds.get(name.split(".")[-1], self.kind)
            out[f"{name}.weight"] = Tensor.random(kind, shape, rng, scale=1.5 / math.sqrt(shape[-1]))

        def norm(name: str, size: int = self.width) -> None:
            out[f"{name}.weight"] = Tensor.of(rng.uniform(0.5, 1.5, size))

        matrix("token_embd", self.vocab, self.width)
        if self.rope_factors is not None:
            out["rope_freqs.weight"] = Tensor.of(np.asarray(self.rope_factors))
        if self.long_factors is not None:
            out["rope_factors_short.weight"] = Tensor.of(np.ones(len(self.long_factors)))
            out["rope_factors_long.weight"] = Tensor.of(np.asarray(self.long_factors))
        gemma, heads = (
            self.architecture.startswith("gemma"),
            self.architecture in ("gemma3", "qwen3", "qwen3moe"),
        )
        for i in range(self.layers):
            at = f"blk.{i}."
            norm(at + "attn_norm")
            if self.architecture == "phi3":
                matrix(at + "attn_qkv", inner + 2 * kv, self.width)
            else:
                for name, size in (("attn_q", inner), ("attn_k", kv), ("attn_v", kv)):
                    matrix(at + name, size, self.width)
                    if self.biases:
                        out[f"{at}{name}.bias"] = Tensor.of(rng.uniform(-1, 1, size))
            if heads:
                norm(at + "attn_q_norm", self.head_dim)
                norm(at + "attn_k_norm", self.head_dim)
            matrix(at + "attn_output", self.width, inner)
            if gemma:
                norm(at + "post_attention_norm")
            norm(at + "ffn_norm")
            self._network(at, matrix)
            if gemma:
                norm(at + "post_ffw_norm")
        norm("output_norm")
        if not self.tied:
            matrix("output", self.vocab, self.width)
        return out

    def _network(self, at: str, matrix: Callable[..., None]) -> None:
        """Add the tensors of a layer's feed-forward network."""
        if self.architecture == "phi3":
            matrix(at + "ffn_up", 2 * self.hidden, self.width)
            matrix(at + "ffn_down", self.width, self.hidden)
            return
        end, count = ("_exps", (self.experts,)) if self.experts else ("", ())
        if self.experts:
            matrix(at + "ffn_gate_inp", self.experts, self.width)
        matrix(f"{at}ffn_gate{end}", *count, self.hidden, self.width)
        matrix(f"{at}ffn_up{end}", *count, self.hidden, self.width)
        matrix(f"{at}ffn_down{end}", *count, self.width, self.hidden)

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        return write_gguf(path, self.metadata(), self.tensors())
