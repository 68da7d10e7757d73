"""Llama and Qwen 2 in float64 numpy, written to be read: the oracle for whole tiny models.

Nothing here is batched or cached. Weights come from `weights.quants.dequantize`; the rotation follows
llama.cpp's two conventions ("norm" turns neighbours, "neox" turns halves).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import dequantize
from support.activations import FLOATING, rounded

Array = NDArray[np.float64]


class ReferenceDecoder:
    """A decoder read from a GGUF file.

    Args:
        as_kernels: round what the kernels round: keys and values to half precision, and what enters a
            quantised matrix to int8; see `activations.rounded`.
    """

    def __init__(self, path: Path, *, as_kernels: bool = False) -> None:
        with GGUFFile.open(path) as file:
            self.metadata = file.metadata
            self.weights: dict[str, Array] = {
                name: dequantize(info.type, file.data(name), info.shape).astype(np.float64)
                for name, info in file.tensors.items()
            }
            self.rounding = {
                name for name, info in file.tensors.items() if as_kernels and info.type not in FLOATING
            }
        self.as_kernels = as_kernels
        self.architecture = str(self.metadata["general.architecture"])
        self.heads = int(self._key("attention.head_count"))
        self.kv_heads = int(self._key("attention.head_count_kv", self.heads))
        self.head_dim = int(self._key("attention.key_length", self._key("embedding_length") // self.heads))

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits [n, vocab] of every position of a text."""
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        angles = np.outer(np.arange(len(tokens)), self._frequencies())
        for layer in range(int(self._key("block_count"))):
            at = f"blk.{layer}."
            x = x + self._attention(at, self._norm(at + "attn_norm", x), angles)
            y = self._norm(at + "ffn_norm", x)
            gated = _silu(self._linear(at + "ffn_gate", y)) * self._linear(at + "ffn_up", y)
            x = x + self._linear(at + "ffn_down", gated)
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self._linear(head, self._norm("output_norm", x))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _attention(self, at: str, y: Array, angles: Array) -> Array:
        n = len(y)
        q = self._rope(self._linear(at + "attn_q", y).reshape(n, self.heads, self.head_dim), angles)
        k = self._rope(self._linear(at + "attn_k", y).reshape(n, self.kv_heads, self.head_dim), angles)
        v = self._linear(at + "attn_v", y).reshape(n, self.kv_heads, self.head_dim)
        if self.as_kernels:
            k, v = (a.astype(np.float32).astype(np.float16).astype(np.float64) for a in (k, v))
        k, v = (np.repeat(a, self.heads // self.kv_heads, axis=1) for a in (k, v))
        scores = np.matmul(q.transpose(1, 0, 2), k.transpose(1, 2, 0)) / np.sqrt(self.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        chances = np.exp(scores - scores.max(axis=2, keepdims=True))
        chances /= chances.sum(axis=2, keepdims=True)
        mixed = np.matmul(chances, v.transpose(1, 0, 2)).transpose(1, 0, 2)
        return self._linear(at + "attn_output", mixed.reshape(n, -1))

    def _frequencies(self) -> Array:
        size = int(self._key("rope.dimension_count", self.head_dim))
        base = self._key("rope.freq_base", 10000.0)
        plain = base ** (-np.arange(0, size, 2) / size) / self._key("rope.scaling.factor", 1.0)
        return np.asarray(plain / self.weights.get("rope_freqs.weight", np.ones(1)), np.float64)

    def _rope(self, x: Array, angles: Array) -> Array:
        """Turn the first 2 * angles.shape[1] dimensions of each head [n, heads, dim]."""
        pairs = angles.shape[1]
        turned = x.copy()
        one, other = (
            (turned[..., 0 : 2 * pairs : 2], turned[..., 1 : 2 * pairs : 2])
            if self.architecture == "llama"
            else (turned[..., :pairs], turned[..., pairs : 2 * pairs])
        )
        z = (one + 1j * other) * np.exp(1j * angles)[:, None, :]
        one[...], other[...] = z.real, z.imag
        return turned

    def _norm(self, name: str, x: Array) -> Array:
        eps = self._key("attention.layer_norm_rms_epsilon")
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
        return np.asarray(scaled * self.weights[name + ".weight"], np.float64)

    def _linear(self, name: str, x: Array) -> Array:
        seen = rounded(x) if name + ".weight" in self.rounding else x
        bias = self.weights.get(name + ".bias", np.zeros(1))
        return np.asarray(seen @ self.weights[name + ".weight"].T + bias, np.float64)

    def _key(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)


def _silu(x: Array) -> Array:
    return np.asarray(x / (1.0 + np.exp(-x)), np.float64)
