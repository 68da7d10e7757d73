"""Llama and Qwen 2 in float64 numpy, written to be read: the oracle for whole tiny models.

Nothing here is quantised, batched or cached. Weights come from `weights.quants.dequantize`; the rotation
follows llama.cpp's two conventions ("norm" turns neighbours, "neox" turns halves).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import dequantize

Array = NDArray[np.float64]


class ReferenceDecoder:
    """A decoder read from a GGUF file."""

    def __init__(self, path: Path) -> None:
        with GGUFFile.open(path) as file:
            self.metadata = file.metadata
            self.weights: dict[str, Array] = {
                name: dequantize(info.type, file.data(name), info.shape).astype(np.float64)
                for name, info in file.tensors.items()
            }
        self.architecture = str(self.metadata["general.architecture"])
        self.heads = int(self._key("attention.head_count"))
        self.kv_heads = int(self._key("attention.head_count_kv", self.heads))
        self.head_dim = int(self._key("attention.key_length", self._key("embedding_length") // self.heads))

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits [n, vocab] of every position of a text."""
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        angles = np.outer(np.arange(len(tokens)), self._frequencies())
        for layer in range(int(self._key("block_count"))):
            w = _Layer(self.weights, f"blk.{layer}.")
            x = x + self._attention(w, self._norm(x, w["attn_norm.weight"]), angles)
            y = self._norm(x, w["ffn_norm.weight"])
            x = x + (_silu(w.linear("ffn_gate", y)) * w.linear("ffn_up", y)) @ w["ffn_down.weight"].T
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return np.asarray(self._norm(x, self.weights["output_norm.weight"]) @ head.T, np.float64)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _attention(self, w: _Layer, y: Array, angles: Array) -> Array:
        n = len(y)
        q = self._rope(w.linear("attn_q", y).reshape(n, self.heads, self.head_dim), angles)
        k = self._rope(w.linear("attn_k", y).reshape(n, self.kv_heads, self.head_dim), angles)
        v = w.linear("attn_v", y).reshape(n, self.kv_heads, self.head_dim)
        k, v = (np.repeat(a, self.heads // self.kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        chances = np.exp(scores - scores.max(axis=2, keepdims=True))
        chances /= chances.sum(axis=2, keepdims=True)
        return w.linear("attn_output", np.einsum("hij,jhd->ihd", chances, v).reshape(n, -1))

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

    def _norm(self, x: Array, gamma: Array) -> Array:
        eps = self._key("attention.layer_norm_rms_epsilon")
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gamma, np.float64)

    def _key(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)


class _Layer:
    def __init__(self, weights: dict[str, Array], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Array:
        return self._weights[self._prefix + name]

    def linear(self, name: str, x: Array) -> Array:
        bias = self._weights.get(f"{self._prefix}{name}.bias", np.zeros(1))
        return np.asarray(x @ self[f"{name}.weight"].T + bias, np.float64)


def _silu(x: Array) -> Array:
    return np.asarray(x / (1.0 + np.exp(-x)), np.float64)
