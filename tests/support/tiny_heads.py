"""Random heads in every public layout, and what their authors' formulas make of them, in float64 numpy.

The reference keeps whole texts and no cache: it shares no code with the drafters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.folders import encoded, safetensors_bytes

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TinyHead:
    """What a random head holds.

    Attributes:
        kind: "eagle3" or "eagle".
        layout: "SafeAILab", "SpecForge", "vLLM", "speculators" or "DeepSpec".
        taps: layers whose inputs it reads; EAGLE-1 reads what the final norm gives.
        draft_vocab: ids of its own output; 0 means the target's head, or all ids.
        own_embedding: whether the file has an embedding.
        scale: how large numbers grow in a matrix. EAGLE-1 norms nothing before its attention, so that large
            ones are what the half precision of the cache shows in.
        settings: more of config.json.
        layer: more of what it says of the layer.
    """

    kind: str = "eagle3"
    layout: str = "SafeAILab"
    taps: tuple[int, ...] = (2, 4, 5)
    target_layers: int = 8
    width: int = 64
    hidden: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 97
    draft_vocab: int = 48
    layers: int = 1
    own_embedding: bool = False
    bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool | None = None
    scale: float = 1.2
    settings: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def kept(self) -> Array:
        """The target's ids that the head drafts, ascending."""
        rng = np.random.default_rng(self.seed + 1)
        return (
            np.sort(rng.permutation(self.vocab)[: self.draft_vocab])
            if self.draft_vocab
            else np.arange(self.vocab)
        )

    def arrays(self) -> dict[str, Array]:
        """Weights in float32, by the names of SafeAILab's layout; `d2t` and `t2d` apart."""
        rng = np.random.default_rng(self.seed)
        found: dict[str, Array] = {}

        def matrix(name: str, rows: int, cols: int) -> None:
            values = rng.standard_normal((rows, cols)) * self.scale / math.sqrt(cols)
            found[name + ".weight"] = values.astype(np.float32)

        def norm(name: str, size: int = self.width) -> None:
            found[name + ".weight"] = rng.uniform(0.5, 1.5, size).astype(np.float32)

        eagle3 = self.kind == "eagle3"
        matrix("fc", self.width, self.width * (len(self.taps) if eagle3 else 2))
        if self.bias:
            found["fc.bias"] = rng.uniform(-0.5, 0.5, self.width).astype(np.float32)
        if self.norm_before_fc:
            norm("input_norm", self.width * len(self.taps))
        for i in range(len(self.taps) if self.fc_norm else 0):
            norm(f"fc_norm.{i}")
        for layer in range(self.layers):
            at = "midlayer." if eagle3 and not layer else f"layers.{layer}."
            self._layer(at, 2 if eagle3 and not layer else 1, matrix, norm, first=not layer)
        if eagle3:
            norm("norm")
            matrix("lm_head", len(self.kept), self.width)
        if self.own_embedding:
            matrix("embed_tokens", self.vocab, self.width)
        return found

    def _layer(self, at: str, wide: int, matrix: Any, norm: Any, *, first: bool) -> None:
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.kind != "eagle" or not first:
            norm(at + "input_layernorm")
        if wide == 2:
            norm(at + "hidden_norm")
        for name, size in (("q", inner), ("k", kv), ("v", kv)):
            matrix(f"{at}self_attn.{name}_proj", size, wide * self.width)
        for name in ("q_norm", "k_norm") if self.qk_norm else ():
            norm(f"{at}self_attn.{name}", self.head_dim)
        matrix(at + "self_attn.o_proj", self.width, inner)
        norm(at + "post_attention_layernorm")
        matrix(at + "mlp.gate_proj", self.hidden, self.width)
        matrix(at + "mlp.up_proj", self.hidden, self.width)
        matrix(at + "mlp.down_proj", self.width, self.hidden)

    def config(self) -> dict[str, Any]:
        """config.json in the layout."""
        layer = {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-5,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            **self.layer,
        }
        flags: dict[str, Any] = {
            name: True
            for name in ("norm_before_fc", "fc_norm", "norm_before_residual")
            if getattr(self, name)
        }
        if self.norm_output is not None:
            flags["norm_output"] = self.norm_output
        outputs = [tap - 1 for tap in self.taps]
        if self.kind == "eagle3":
            flags["draft_vocab_size"] = len(self.kept)
        match self.layout if self.kind == "eagle3" else "":
            case "speculators":
                flags |= {
                    "architectures": ["Eagle3Speculator"],
                    "speculators_model_type": "eagle3",
                    "eagle_aux_hidden_state_layer_ids": list(self.taps),
                }
                return {"transformer_layer_config": layer, **flags, **self.settings}
            case "SpecForge":
                flags["architectures"] = ["LlamaForCausalLMEagle3"]
                flags["eagle_config"] = {
                    "eagle_aux_hidden_state_layer_ids": outputs,
                    "use_aux_hidden_state": True,
                }
            case "DeepSpec":
                flags["target_layer_ids"] = outputs
            case "vLLM":
                flags["architectures"] = ["Eagle3LlamaForCausalLM"]
                flags["eagle_aux_hidden_state_layer_ids"] = list(self.taps)
        return {**layer, **flags, **self.settings}

    def write(
        self, path: Path, *, without: Sequence[str] = (), change: Mapping[str, Array] | None = None
    ) -> Path:
        """Write the folder and return its path."""
        path.mkdir(parents=True, exist_ok=True)
        arrays = {**self.arrays(), **dict(change or {})}
        stored = {self._name(name): encoded(values, "F32") for name, values in arrays.items()}
        if self.kind == "eagle3" and self.draft_vocab:
            offsets = (self.kept - np.arange(len(self.kept))).astype(np.int64)
            marks = np.isin(np.arange(self.vocab), self.kept)
            stored[self.mapped_by()] = ("I64", offsets.shape, offsets.tobytes())
            stored["t2d"] = ("BOOL", marks.shape, marks.tobytes())
        for name in without:
            del stored[name]
        (path / "config.json").write_text(json.dumps(self.config()))
        (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
        return path

    def mapped_by(self) -> str:
        """Name of the tensor that maps its ids to the target's."""
        return "draft_id_to_target_id" if self.layout == "vLLM" else "d2t"

    def _name(self, name: str) -> str:
        if self.layout in ("vLLM", "speculators", "DeepSpec"):
            return name.replace("midlayer.", "layers.0.")
        return name


class ReferenceHead:
    """A head by the papers' formulas.

    Args:
        embedding: [vocab, width] the target's.
        head: [vocab, width] the target's output matrix.
        final_norm: [width] and its eps.

    Attributes:
        slip: a mistake to make: how far rows of guesses stand from where they should.
        known: the first of those rows.
    """

    slip = 0
    known = 0

    def __init__(
        self, tiny: TinyHead, embedding: Array, head: Array, final_norm: Array, eps: float = 1e-5
    ) -> None:
        self.tiny = tiny
        self.weights = {name: values.astype(np.float64) for name, values in tiny.arrays().items()}
        self.embedding = self.weights.get("embed_tokens.weight", embedding).astype(np.float64)
        self.head, self.final_norm, self.eps = head.astype(np.float64), final_norm.astype(np.float64), eps

    def fused(self, states: Sequence[Array]) -> Array:
        """[n, width] what the head starts from, of the target's states [n, width] at each of its layers."""
        tiny, weights = self.tiny, self.weights
        if tiny.kind == "eagle":
            return rms(states[0], self.final_norm, self.eps)
        parts = [state.astype(np.float64) for state in states]
        if tiny.fc_norm:
            parts = [rms(part, weights[f"fc_norm.{i}.weight"], 1e-5) for i, part in enumerate(parts)]
        whole = np.concatenate(parts, axis=1)
        if tiny.norm_before_fc:
            whole = rms(whole, weights["input_norm.weight"], 1e-5)
        return whole @ weights["fc.weight"].T

    def rows(self, tokens: Sequence[int], given: Array) -> tuple[Array, Array]:
        """(logits [n, ids], what the next row starts from [n, width]) of rows of tokens and states."""
        tiny, weights = self.tiny, self.weights
        embedded = self.embedding[np.asarray(tokens)]
        if tiny.kind == "eagle":
            x = np.concatenate([embedded, given], axis=1) @ weights["fc.weight"].T
            x = x + weights.get("fc.bias", np.zeros(1))
            x = x + self._attention("layers.0.", x)
            first = "layers.0."
        else:
            first = "midlayer."
            left = rms(embedded, weights[first + "input_layernorm.weight"], 1e-5)
            right = rms(given, weights[first + "hidden_norm.weight"], 1e-5)
            x = right if tiny.norm_before_residual else given
            x = x + self._attention(first, np.concatenate([left, right], axis=1))
        x = x + self._mlp(first, x)
        for layer in range(1, tiny.layers):
            at = f"layers.{layer}."
            x = x + self._attention(at, rms(x, weights[at + "input_layernorm.weight"], 1e-5))
            x = x + self._mlp(at, x)
        if tiny.kind == "eagle":
            return x @ self.head.T, x
        normed = rms(x, weights["norm.weight"], 1e-5)
        speculators = tiny.layout == "speculators"
        seen = normed if speculators or tiny.norm_output is not False else x
        return seen @ weights["lm_head.weight"].T, normed if speculators and tiny.norm_output else x

    def chain(
        self, tokens: Sequence[int], states: Sequence[Array], length: int
    ) -> tuple[list[int], list[Array]]:
        """Greedy guesses behind a text, as ids of the target, and the logits each was chosen by.

        Args:
            tokens: [n] the text.
            states: of its first n - 1 tokens at each layer that is read.
        """
        fed, given = list(tokens[1:]), self.fused(states)
        self.known = len(fed)
        guesses: list[int] = []
        logits: list[Array] = []
        for _ in range(length):
            found, made = self.rows(fed, given)
            logits.append(found[-1])
            guesses.append(int(self.tiny.kept[found[-1].argmax()]))
            fed, given = [*fed, guesses[-1]], np.concatenate([given, made[-1:]])
        return guesses, logits

    def _attention(self, at: str, y: Array) -> Array:
        tiny, weights, n = self.tiny, self.weights, len(y)

        def heads(name: str, count: int) -> Array:
            bias = weights.get(f"{at}self_attn.{name}_proj.bias", np.zeros(1))
            x = (y @ weights[f"{at}self_attn.{name}_proj.weight"].T + bias).reshape(n, count, tiny.head_dim)
            norm = weights.get(f"{at}self_attn.{name}_norm.weight")
            return x if norm is None else rms(x, norm, 1e-5)

        places = np.arange(n) + self.slip * (np.arange(n) >= self.known)
        q = rotated(heads("q", tiny.heads), places, self._base())
        k, v = rotated(heads("k", tiny.kv_heads), places, self._base()), heads("v", tiny.kv_heads)
        k, v = (
            x.astype(np.float32).astype(np.float16).astype(np.float64) for x in (k, v)
        )  # as they are filed
        k, v = (np.repeat(x, tiny.heads // tiny.kv_heads, axis=1) for x in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(tiny.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        out = np.einsum("hij,jhd->ihd", shares, v).reshape(n, -1)
        return np.asarray(out @ weights[at + "self_attn.o_proj.weight"].T)

    def _mlp(self, at: str, x: Array) -> Array:
        weights = self.weights
        y = rms(x, weights[at + "post_attention_layernorm.weight"], 1e-5)
        gate = y @ weights[at + "mlp.gate_proj.weight"].T
        up = y @ weights[at + "mlp.up_proj.weight"].T
        return np.asarray((gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T)

    def _base(self) -> float:
        return float(self.tiny.settings.get("rope_theta", 10000.0))


def rms(x: Array, gamma: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gamma)


def rotated(x: Array, places: Array, base: float) -> Array:
    """Turn halves of each head [n, heads, dim] by position."""
    dim = x.shape[2]
    angles = np.outer(places, base ** (-np.arange(0, dim, 2) / dim))[:, None, :]
    one, other = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate(
        [one * np.cos(angles) - other * np.sin(angles), one * np.sin(angles) + other * np.cos(angles)], axis=2
    )
