"""All architectures in float64 numpy, written to be read: the oracle for whole tiny models.

Nothing here is batched or cached. Weights come from `weights.quants.dequantize`; the rotation follows
llama.cpp's two conventions ("norm" turns neighbours, "neox" turns halves). What a layer has is told by the
tensors it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import dequantize
from support.activations import seen_by

Array = NDArray[np.float64]


class ReferenceDecoder:
    """A decoder read from a GGUF file.

    Args:
        as_kernels: round what the kernels round: keys and values to half precision, and what enters a
            matrix; see `activations.seen_by`.
    """

    def __init__(self, path: Path, *, as_kernels: bool = False) -> None:
        with GGUFFile.open(path) as file:
            self.metadata = file.metadata
            self.weights: dict[str, Array] = {
                name: dequantize(info.type, file.data(name), info.shape).astype(np.float64)
                for name, info in file.tensors.items()
            }
            self.kinds = {name: info.type for name, info in file.tensors.items()}
        self.as_kernels = as_kernels
        self.architecture = str(self.metadata["general.architecture"])
        self.heads = int(self._key("attention.head_count"))
        self.kv_heads = int(self._key("attention.head_count_kv", self.heads))
        self.head_dim = int(self._key("attention.key_length", self._key("embedding_length") // self.heads))
        self.gemma = self.architecture.startswith("gemma")

    def logits(self, tokens: Sequence[int], *, longest: int | None = None) -> Array:
        """Logits [n, vocab] of every position of a text.

        Args:
            longest: positions of the longest text there can be, for ropes that depend on it.
        """
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        if self.gemma:
            x = x * np.sqrt(x.shape[1])
        for layer in range(int(self._key("block_count"))):
            at = f"blk.{layer}."
            y = self._attention(at, layer, self._norm(at + "attn_norm", x), longest or len(tokens))
            x = x + self._post_norm(at + "post_attention_norm", y)
            y = self._norm(at + "ffn_norm", x)
            y = self._experts(at, y) if at + "ffn_gate_inp.weight" in self.weights else self._network(at, y)
            x = x + self._post_norm(at + "post_ffw_norm", y)
        head = "output" if "output.weight" in self.weights else "token_embd"
        return _capped(self._linear(head, self._norm("output_norm", x)), self._key("final_logit_softcapping"))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _attention(self, at: str, layer: int, y: Array, longest: int) -> Array:
        n, window = len(y), self._window(layer)
        q, k, v = self._projected(at, y)
        q, k = self._head_norm(at + "attn_q_norm", q), self._head_norm(at + "attn_k_norm", k)
        angles, scale = self._angles(window > 0, n, longest)
        q, k = (self._rope(a, angles) * self._magnitude(scale, a) for a in (q, k))
        if self.as_kernels:
            k, v = (a.astype(np.float32).astype(np.float16).astype(np.float64) for a in (k, v))
        k, v = (np.repeat(a, self.heads // self.kv_heads, axis=1) for a in (k, v))
        by = self._key("attention.scale", 1 / np.sqrt(self.head_dim))
        scores = np.matmul(q.transpose(1, 0, 2), k.transpose(1, 2, 0)) * by
        scores = _capped(scores, self._key("attn_logit_softcapping"))
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        scores[:, (distance < 0) | ((distance >= window) & (window > 0))] = -np.inf
        chances = _softmax(scores)
        mixed = np.matmul(chances, v.transpose(1, 0, 2)).transpose(1, 0, 2)
        return self._linear(at + "attn_output", mixed.reshape(n, -1))

    def _projected(self, at: str, y: Array) -> list[Array]:
        """Query, key and value [n, heads, head_dim]."""
        sizes = [self.heads * self.head_dim] + [self.kv_heads * self.head_dim] * 2
        if at + "attn_qkv.weight" in self.weights:
            parts = np.split(self._linear(at + "attn_qkv", y), np.cumsum(sizes)[:2], axis=1)
        else:
            parts = [self._linear(at + name, y) for name in ("attn_q", "attn_k", "attn_v")]
        return [part.reshape(len(y), -1, self.head_dim) for part in parts]

    def _network(self, at: str, y: Array) -> Array:
        if at + "ffn_gate.weight" in self.weights:
            gate, up = self._linear(at + "ffn_gate", y), self._linear(at + "ffn_up", y)
        else:
            gate, up = np.split(self._linear(at + "ffn_up", y), 2, axis=1)
        return self._linear(at + "ffn_down", (_gelu(gate) if self.gemma else _silu(gate)) * up)

    def _experts(self, at: str, y: Array) -> Array:
        chances = _softmax(self._linear(at + "ffn_gate_inp", y))
        out = np.zeros_like(y)
        for row, chance in enumerate(chances):
            chosen = np.argsort(-chance, kind="stable")[: int(self._key("expert_used_count"))]
            shares = chance[chosen] / (
                chance[chosen].sum() if self._key("expert_weights_norm", True) else 1.0
            )
            for expert, share in zip(chosen, shares, strict=True):
                one = y[row : row + 1]
                gate = self._linear(at + "ffn_gate_exps", one, expert)
                up = self._linear(at + "ffn_up_exps", one, expert)
                out[row] += share * self._linear(at + "ffn_down_exps", _silu(gate) * up, expert)[0]
        return out

    def _window(self, layer: int) -> int:
        period = int(
            self._key(
                "attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6}.get(self.architecture, 0)
            )
        )
        return 0 if period and (layer + 1) % period == 0 else int(self._key("attention.sliding_window", 0))

    def _angles(self, local: bool, n: int, longest: int) -> tuple[Array, float]:
        """Angles [n, pairs] and what cosines and sines are multiplied by."""
        size = int(self._key("rope.dimension_count", self.head_dim))
        base = self._key("rope.freq_base", 10000.0)
        if local and self.architecture == "gemma3":
            return np.outer(np.arange(n), 10000.0 ** (-np.arange(0, size, 2) / size)), 1.0
        kind, factor = self._key("rope.scaling.type", "none"), self._key("rope.scaling.factor", 1.0)
        original = self._key("rope.scaling.original_context_length", self._key("context_length"))
        if kind == "dynamic" and longest > original:
            base *= (factor * longest / original - (factor - 1)) ** (size / (size - 2))
        speed = base ** (-np.arange(0, size, 2) / size)
        length = "long" if longest > original else "short"
        for name in ("rope_freqs.weight", f"rope_factors_{length}.weight"):
            speed = speed / self.weights.get(name, np.ones(1))
        if kind == "linear":
            speed = speed / factor
        if kind == "yarn":
            edges = [size * np.log(original / (2 * np.pi * turns)) / (2 * np.log(base)) for turns in (32, 1)]
            low, high = max(np.floor(edges[0]), 0), min(np.ceil(edges[1]), size - 1)
            slow = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)
            speed = speed * (1 - slow) + speed / factor * slow
        own = 1 + 0.1 * np.log(factor) if kind == "yarn" else 1.0
        return np.outer(np.arange(n), speed), own * self._key("rope.scaling.attn_factor", 1.0)

    def _magnitude(self, scale: float, x: Array) -> Array:
        """The scale for the dimensions that turn, 1 for the others."""
        size = int(self._key("rope.dimension_count", self.head_dim))
        return np.where(np.arange(x.shape[-1]) < size, scale, 1.0)

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

    def _post_norm(self, name: str, x: Array) -> Array:
        return self._norm(name, x) if name + ".weight" in self.weights else x

    _head_norm = _post_norm

    def _linear(self, name: str, x: Array, expert: int | None = None) -> Array:
        seen = seen_by(self.kinds[name + ".weight"], x) if self.as_kernels else x
        weight = self.weights[name + ".weight"]
        bias = self.weights.get(name + ".bias", np.zeros(1))
        return np.asarray(seen @ (weight if expert is None else weight[expert]).T + bias, np.float64)

    def _key(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)


def _silu(x: Array) -> Array:
    return np.asarray(x / (1.0 + np.exp(-x)), np.float64)


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), np.float64)


def _softmax(x: Array) -> Array:
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True), np.float64)


def _capped(x: Array, cap: float | None) -> Array:
    return np.asarray(cap * np.tanh(x / cap), np.float64) if cap else x
