"""Random DFlash and DSpark checkpoints of every public layout, and what they compute, in float64 numpy.

The oracle reads the files by their own names and knows nothing of how Paceline lays anything out. A block
is computed from scratch: no cache, no quantisation, one query at a time where that is clearer.
"""

from __future__ import annotations

import json
import math
import struct
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
    """What a random checkpoint holds.

    Attributes:
        layout: "z-lab", "specforge", "speculators" or "deepspec".
        taps: whose outputs of the target it reads, counted from 0.
        sliding: layers with a window.
        own: whether it brings an embedding and a head of its own.
        draft_vocab: rows of its head, if fewer than the target's.
        markov: kind of Markov head; None means DFlash.
        confidence: None for no confidence head, else whether it reads the Markov embedding too.
        settings: departures of config.json; GONE as a value takes the key away.
        nested: the same within dflash_config or transformer_layer_config.
    """

    layout: str = "z-lab"
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 96
    layers: int = 2
    vocab: int = 262
    target_layers: int = 4
    taps: tuple[int, ...] = (0, 2)
    block: int = 5
    mask: int = 250
    sliding: tuple[int, ...] = ()
    window: int = 6
    own: bool = False
    draft_vocab: int | None = None
    markov: str | None = None
    rank: int = 32
    confidence: bool | None = None
    head_norms: bool = True
    biases: bool = False
    theta: float = 10000.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    nested: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "F32"
    seed: int = 0

    def config(self) -> dict[str, Any]:
        """config.json as its layout spells it."""
        sparks = self.markov is not None or self.confidence is not None
        heads = {
            "markov_rank": self.rank if self.markov else 0,
            "markov_head_type": self.markov or "vanilla",
            "enable_confidence_head": self.confidence is not None,
            "confidence_head_with_markov": bool(self.confidence),
        }
        match self.layout:
            case "z-lab":
                inner = {"mask_token_id": self.mask, "target_layer_ids": list(self.taps)}
                config = {
                    **self._transformer(),
                    "architectures": ["DFlashDraftModel"],
                    "block_size": self.block,
                    "num_target_layers": self.target_layers,
                    "dflash_config": _without({**inner, **self.nested}),
                }
            case "specforge":
                inner = {
                    "mask_token_id": self.mask,
                    "target_layer_ids": list(self.taps),
                    "block_size": self.block,
                    "attention_mode": "gqa",
                }
                if sparks:
                    inner |= {**heads, "projector_type": "dspark", "confidence_head_alpha": 1.0}
                config = {
                    **self._transformer(),
                    "architectures": ["DSparkDraftModel" if sparks else "DFlashDraftModel"],
                    "num_target_layers": self.target_layers,
                    "dflash_config": _without({**inner, **self.nested}),
                }
            case "speculators":
                config = {
                    "architectures": ["DSparkSpeculator" if sparks else "DFlashSpeculator"],
                    "speculators_model_type": "dspark" if sparks else "dflash",
                    "transformer_layer_config": _without({**self._transformer(), **self.nested}),
                    "draft_vocab_size": self.draft_vocab or self.vocab,
                    "block_size": self.block,
                    "aux_hidden_state_layer_ids": [tap + 1 for tap in self.taps],
                    "mask_token_id": self.mask,
                    "sliding_window_non_causal": False,
                    "sample_from_anchor": sparks,
                    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny"}},
                }
                config |= heads if sparks else {}
            case "deepspec":
                config = {
                    **self._transformer(),
                    **heads,
                    "architectures": ["Qwen3DSparkModel"],
                    "block_size": self.block,
                    "num_target_layers": self.target_layers,
                    "target_layer_ids": list(self.taps),
                    "mask_token_id": self.mask,
                    "num_anchors": 8,
                    "tie_word_embeddings": False,
                }
            case _:
                raise AssertionError(self.layout)
        return _without({**config, **self.settings})

    def arrays(self) -> dict[str, Array]:
        """Weights by their names in the file, in float32."""
        rng = np.random.default_rng(self.seed)
        found: dict[str, Array] = {}
        for name, shape in self.shapes().items():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                values = rng.uniform(0.7, 1.7, shape)
            elif name.endswith("norm.weight"):
                values = rng.uniform(0.5, 1.5, shape)
            elif name.endswith(".bias"):
                values = rng.uniform(-0.5, 0.5, shape)
            else:
                scale = 0.5 if name in ("embed_tokens.weight", "lm_head.weight") else 1.2
                values = rng.standard_normal(shape) * scale / math.sqrt(shape[-1])
            found[name] = values.astype(np.float32)
        if "markov_head.markov_w1.weight" in found:
            found["markov_head.markov_w1.weight"] *= math.sqrt(self.rank)
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        width, inner, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, len(self.taps) * width),
            "hidden_norm.weight": (width,),
            "norm.weight": (width,),
        }
        for i in range(self.layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (width,),
                "post_attention_layernorm.weight": (width,),
                "self_attn.q_proj.weight": (inner, width),
                "self_attn.k_proj.weight": (kv, width),
                "self_attn.v_proj.weight": (kv, width),
                "self_attn.o_proj.weight": (width, inner),
                "mlp.gate_proj.weight": (self.hidden, width),
                "mlp.up_proj.weight": (self.hidden, width),
                "mlp.down_proj.weight": (width, self.hidden),
            }
            if self.head_norms:
                layer |= {f"self_attn.{one}_norm.weight": (self.head_dim,) for one in "qk"}
            if self.biases:
                sizes = {"q": inner, "k": kv, "v": kv, "o": width}
                layer |= {f"self_attn.{one}_proj.bias": (size,) for one, size in sizes.items()}
            found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        if self.own or self.draft_vocab:
            found["lm_head.weight"] = (self.draft_vocab or self.vocab, width)
        if self.own:
            found["embed_tokens.weight"] = (self.vocab, width)
        return found | self._chain_shapes()

    def mapping(self) -> dict[str, Array]:
        """d2t, offsets, and t2d, membership, where the vocabulary is reduced."""
        if self.draft_vocab is None:
            return {}
        rng = np.random.default_rng(self.seed + 1)
        kept = np.sort(rng.permutation(self.vocab)[: self.draft_vocab])
        member = np.zeros(self.vocab, np.bool_)
        member[kept] = True
        return {"d2t": kept - np.arange(self.draft_vocab), "t2d": member}

    def write(self, path: Path, arrays: Mapping[str, Array] | None = None) -> Path:
        """Write the folder and return its path; `arrays` stand in for the random ones."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config()))
        floats = self.arrays() if arrays is None else arrays
        stored = {name: encoded(values, self.dtype) for name, values in floats.items()}
        kinds = {"d2t": ("I64", np.int64), "t2d": ("BOOL", np.bool_)}
        for name, values in self.mapping().items():
            dtype, kind = kinds[name]
            stored[name] = dtype, values.shape, values.astype(kind).tobytes()
        (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
        return path

    def _transformer(self) -> dict[str, Any]:
        kinds = ["sliding_attention" if i in self.sliding else "full_attention" for i in range(self.layers)]
        return {
            "model_type": "qwen3",
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.theta,
            "rope_scaling": None,
            "attention_bias": self.biases,
            "hidden_act": "silu",
            "layer_types": kinds,
            "sliding_window": self.window if self.sliding else None,
            "use_sliding_window": bool(self.sliding),
            "tie_word_embeddings": True,
        }

    def _chain_shapes(self) -> dict[str, tuple[int, ...]]:
        width, rank, found = self.width, self.rank, dict[str, tuple[int, ...]]()
        if self.markov:
            found["markov_head.markov_w1.weight"] = (self.vocab, rank)
            found["markov_head.markov_w2.weight"] = (self.draft_vocab or self.vocab, rank)
        if self.markov == "gated":
            found["markov_head.gate_proj.weight"] = (rank, width + rank)
            found["markov_head.gate_proj.bias"] = (rank,)
        if self.markov == "rnn":
            found["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            found["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.confidence is not None:
            found["confidence_head.proj.weight"] = (1, width + rank * self.confidence)
            found["confidence_head.proj.bias"] = (1,)
        return found


@dataclass
class Said:
    """What a head says after a text: [n] tokens, [n, V] logits that chose them (the target's ids, -inf where
    it has none), [n] probability or confidence of each."""

    tokens: list[int]
    logits: Array
    sure: list[float]


class BlockOracle:
    """A checkpoint in float64.

    Args:
        embedding, head: [V, width] of the target, for a checkpoint without its own.
        first: whether the anchor's slot predicts too.
        causal: of each layer, whether a slot of the block sees only those before it.
    """

    def __init__(
        self, path: Path, embedding: Array, head: Array, *, first: bool, causal: Sequence[bool]
    ) -> None:
        config = json.loads((path / "config.json").read_text())
        self.settings = config.get("transformer_layer_config", config)
        self.weights = {name: _values(path / "model.safetensors", name) for name in _names(path)}
        inner = config.get("dflash_config", config)
        self.block = inner.get("block_size", config.get("block_size"))
        self.mask = inner["mask_token_id"]
        self.kind = inner.get("markov_head_type", "vanilla")
        self.first, self.causal = first, causal
        self.embedding = self.weights.get("embed_tokens.weight", embedding)
        self.head = self.weights.get("lm_head.weight", head)
        self.places = None
        if "d2t" in self.weights:
            self.places = (self.weights["d2t"] + np.arange(len(self.weights["d2t"]))).astype(int)

    def features(self, states: Sequence[Array]) -> Array:
        """[n, width] of the tapped states [n, width] each, in the order of the file's list."""
        return self._norm(np.concatenate(states, axis=1) @ self.weights["fc.weight"].T, "hidden_norm")

    def hidden(self, features: Array, anchor: int) -> Array:
        """[B, width] of a block whose anchor stands behind the context `features`."""
        start, tokens = len(features), [anchor, *[self.mask] * (self.block - 1)]
        x = self.embedding[tokens]
        for i in range(self.settings["num_hidden_layers"]):
            at = f"layers.{i}."
            u = self._norm(x, at + "input_layernorm")
            x = x + self._attend(i, u, features, start)
            u = self._norm(x, at + "post_attention_layernorm")
            gate, up = self._linear(at + "mlp.gate_proj", u), self._linear(at + "mlp.up_proj", u)
            x = x + self._linear(at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return self._norm(x, "norm")

    def say(self, features: Array, anchor: int, count: int) -> Said:
        """Greedy tokens, left to right."""
        hidden = self.hidden(features, anchor)
        tokens, rows, sure = [], [], []
        state, before = np.zeros(0), anchor
        if not self.first:
            _, _, state = self._bias(hidden[0], before, state)
            hidden = hidden[1:]
        for h in hidden[:count]:
            bias, w, state = self._bias(h, before, state)
            row = h @ self.head.T + bias
            if self.places is not None:
                whole = np.full(len(self.embedding), -np.inf)
                whole[self.places] = row
                row = whole
            token = int(row.argmax())
            chance = np.exp(row[token] - row.max()) / np.exp(row - row.max()).sum()
            if "confidence_head.proj.weight" in self.weights:
                proj = self.weights["confidence_head.proj.weight"][0]
                heard = np.concatenate([h, w])[: len(proj)]
                chance = _sigmoid(heard @ proj + self.weights["confidence_head.proj.bias"][0])
            tokens.append(token)
            rows.append(row)
            sure.append(float(chance))
            before = token
        return Said(tokens, np.array(rows), sure)

    def _bias(self, h: Array, before: int, state: Array) -> tuple[Array, Array, Array]:
        """What the Markov head adds to the logits, its embedding of the token before, and its state."""
        if "markov_head.markov_w1.weight" not in self.weights:
            return np.zeros(len(self.head)), np.zeros(0), state
        w = self.weights["markov_head.markov_w1.weight"][before]
        latent = w
        if self.kind == "gated":
            z = self._linear("markov_head.gate_proj", np.concatenate([h, w]))
            latent = _sigmoid(z) * w
        if self.kind == "rnn":
            state = state if len(state) else np.zeros(len(w))
            z = self._linear("markov_head.joint_proj", np.concatenate([state, w, h]))
            gate, candidate, out = np.split(z, 3)
            state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(candidate)
            latent = np.tanh(out)
        return self.weights["markov_head.markov_w2.weight"] @ latent, w, state

    def _attend(self, i: int, u: Array, context: Array, start: int) -> Array:
        at, dim = f"layers.{i}.self_attn.", self.settings["head_dim"]
        both = np.concatenate([context, u])
        q = self._heads(at + "q", u, np.arange(start, start + len(u)))
        k = self._heads(at + "k", both, np.arange(len(both)))
        v = self._linear(at + "v_proj", both).reshape(len(both), -1, dim)
        group = q.shape[1] // k.shape[1]
        sliding = self.settings["layer_types"][i] == "sliding_attention"
        out = np.zeros_like(q)
        for slot in range(len(u)):
            position = start + slot
            seen = np.arange(len(both))
            if self.causal[i]:
                seen = seen[seen <= position]
            if sliding:
                seen = seen[seen > position - self.settings["sliding_window"]]
            for head in range(q.shape[1]):
                scores = k[seen, head // group] @ q[slot, head] / math.sqrt(dim)
                shares = np.exp(scores - scores.max())
                out[slot, head] = shares / shares.sum() @ v[seen, head // group]
        return self._linear(at + "o_proj", out.reshape(len(u), -1))

    def _heads(self, name: str, x: Array, positions: Array) -> Array:
        """[n, heads, dim] queries or keys, normed and turned."""
        dim = self.settings["head_dim"]
        heads = self._linear(name + "_proj", x).reshape(len(x), -1, dim)
        if name + "_norm.weight" in self.weights:
            heads = self._norm(heads, name + "_norm")
        speeds = self.settings["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        angles = np.outer(positions, speeds)[:, None, :]
        one, other = heads[..., : dim // 2], heads[..., dim // 2 :]
        return np.concatenate(
            [one * np.cos(angles) - other * np.sin(angles), other * np.cos(angles) + one * np.sin(angles)],
            axis=-1,
        )

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", 0.0)

    def _norm(self, x: Array, name: str) -> Array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.settings["rms_norm_eps"]) * self.weights[name + ".weight"]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that a test took away; a null that a layout writes stays."""
    return {key: value for key, value in config.items() if value is not GONE}


GONE = object()
"""In `settings` or `nested`: the key is not written at all."""


def _names(path: Path) -> list[str]:
    return list(_header(path / "model.safetensors")[0])


def _header(path: Path) -> tuple[dict[str, Any], int]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), 8 + length


def _values(path: Path, name: str) -> Array:
    header, base = _header(path)
    entry = header[name]
    begin, end = entry["data_offsets"]
    raw = path.read_bytes()[base + begin : base + end]
    if entry["dtype"] == "BF16":
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32)
    else:
        kinds = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "BOOL": np.bool_}
        values = np.frombuffer(raw, kinds[entry["dtype"]])
    return values.reshape(entry["shape"]).astype(np.float64)
