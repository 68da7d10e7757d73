"""Random MTP heads in the layouts they are published in, and what their formulas make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.folders import encoded, safetensors_bytes
from support.gguf_writer import LAYER_NAMES, Tensor, write_gguf
from support.tiny_heads import Array, ReferenceHead, TinyHead, rms

_QWEN = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head_norm": "mtp.norm",
}
_MIMO = {
    "eh_proj": "input_proj",
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "shared_head_norm": "final_layernorm",
}
_MIMO_V2 = {"shared_head_norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
_DEEPSEEK = {
    "shared_head_norm": "shared_head.norm",
    "shared_head_head": "shared_head.head",
}


@dataclass(frozen=True, kw_only=True)
class TinyMtp(TinyHead):
    """What a random MTP head holds.

    Attributes:
        layout: "Qwen", "MiMo", "MiMo V2", "DeepSeek", "speculators" or "GGUF".
        own_head: whether it has an output matrix of its own.
        biases: on query, key and value.
        heads_in_file: how many heads the file has; the first is used.
        post_hidden, post_chain: whether states are normalised when they come in, and when they are handed on;
            None means as MiMo has it, and all others.
    """

    kind: str = "mtp"
    layout: str = "Qwen"
    taps: tuple[int, ...] = (8,)
    draft_vocab: int = 0
    own_head: bool = False
    biases: bool = False
    heads_in_file: int = 1
    post_hidden: bool | None = None
    post_chain: bool = True

    def arrays(self) -> dict[str, Array]:
        found = self.arrays_of(0)
        return {name.removeprefix("0."): values for name, values in found.items()}

    def arrays_of(self, number: int) -> dict[str, Array]:
        """Weights of one head, its number before each name."""
        rng = np.random.default_rng(self.seed + 100 * number)
        found: dict[str, Array] = {}

        def matrix(name: str, rows: int, cols: int) -> None:
            scaled = rng.standard_normal((rows, cols)) / np.sqrt(cols)
            found[f"{number}.{name}.weight"] = scaled.astype(np.float32)

        def norm(name: str, size: int = self.width) -> None:
            found[f"{number}.{name}.weight"] = rng.uniform(0.5, 1.5, size).astype(np.float32)

        matrix("eh_proj", self.width, 2 * self.width)
        norm("enorm")
        norm("hnorm")
        self._layer("", 1, matrix, norm, first=False)
        sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        for part, count in sizes.items() if self.biases else ():
            name = f"{number}.self_attn.{part}_proj.bias"
            found[name] = rng.uniform(-1, 1, count * self.head_dim).astype(np.float32)
        norm("shared_head_norm")
        if self.own_embedding:
            matrix("embed_tokens", self.vocab, self.width)
        if self.own_head:
            matrix("shared_head_head", self.vocab, self.width)
        return found

    def config(self) -> dict[str, Any]:
        layer = {
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.target_layers,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
        }
        heads = {"num_nextn_predict_layers": self.heads_in_file}
        if self.layout != "speculators":
            return {**layer, **heads, **self.settings}
        sizes = {"intermediate_size": self.hidden, "head_dim": self.head_dim, "vocab_size": self.vocab}
        return {
            "architectures": ["MTPDraftModel"],
            "speculators_model_type": "mtp",
            "transformer_layer_config": {"model_type": "qwen3", **layer, **sizes},
            **heads,
            **self.settings,
        }

    def write(
        self, path: Path, *, without: Sequence[str] = (), change: Mapping[str, Array] | None = None
    ) -> Path:
        if self.layout == "GGUF":
            return self._write_gguf(path.with_suffix(".gguf"))
        path.mkdir(parents=True, exist_ok=True)
        arrays = {
            self.name(name): values
            for i in range(self.heads_in_file)
            for name, values in self.arrays_of(i).items()
        }
        arrays["model.norm.weight"] = np.ones(self.width, np.float32)  # something of the target's
        arrays |= dict(change or {})
        for name in without:
            del arrays[name]
        stored = {name: encoded(values, "F32") for name, values in arrays.items()}
        (path / "config.json").write_text(json.dumps(self.config()))
        (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
        return path

    def name(self, name: str) -> str:
        """A tensor's name in the layout."""
        number, _, rest = name.partition(".")
        part, _, kind = rest.rpartition(".")
        match self.layout:
            case "Qwen":
                return f"{_QWEN[part]}.{kind}" if part in _QWEN else f"mtp.layers.{number}.{part}.{kind}"
            case "MiMo":
                return f"model.mtp_layers.{number}.{_MIMO.get(part, part)}.{kind}"
            case "MiMo V2":
                return f"model.mtp.layers.{number}.{_MIMO_V2.get(part, part)}.{kind}"
            case "speculators":
                return f"mtp_layers.{number}.{_MIMO.get(part, part)}.{kind}"
        return f"model.layers.{self.target_layers + int(number)}.{_DEEPSEEK.get(part, part)}.{kind}"

    def gguf_tensors(self) -> dict[str, Tensor]:
        """The heads as blocks of a GGUF file, and something of the target's."""
        tensors: dict[str, Tensor] = {"output_norm.weight": Tensor.of(np.ones(self.width))}
        for i in range(self.heads_in_file):
            for name, values in self.arrays_of(i).items():
                part, _, kind = name.partition(".")[2].rpartition(".")
                ours = LAYER_NAMES.get(part, f"nextn.{part}")
                tensors[f"blk.{self.target_layers + i}.{ours}.{kind}"] = Tensor.of(values)
        return tensors

    def _write_gguf(self, path: Path) -> Path:
        keys = {
            "block_count": self.target_layers + self.heads_in_file,
            "nextn_predict_layers": self.heads_in_file,
            "embedding_length": self.width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "context_length": 2048,
            "rope.freq_base": 10000.0,
        }
        named = {f"qwen2.{key}": value for key, value in keys.items()}
        return write_gguf(path, {"general.architecture": "qwen2", **named}, self.gguf_tensors())


class ReferenceMtp(ReferenceHead):
    """An MTP head by its formula."""

    tiny: TinyMtp

    def fused(self, states: Sequence[Array]) -> Array:
        state = states[0].astype(np.float64)
        normed = self.tiny.layout != "MiMo" if self.tiny.post_hidden is None else self.tiny.post_hidden
        return rms(state, self.final_norm, self.eps) if normed else state

    def rows(self, tokens: Sequence[int], given: Array) -> tuple[Array, Array]:
        tiny, weights = self.tiny, self.weights
        left = rms(self.embedding[np.asarray(tokens)], weights["enorm.weight"], 1e-5)
        right = rms(given, weights["hnorm.weight"], 1e-5)
        both = [right, left] if tiny.layout == "MiMo" else [left, right]
        x = np.concatenate(both, axis=1) @ weights["eh_proj.weight"].T
        x = x + self._attention("", rms(x, weights["input_layernorm.weight"], 1e-5))
        x = x + self._mlp("", x)
        normed = rms(x, weights["shared_head_norm.weight"], 1e-5)
        head = weights.get("shared_head_head.weight", self.head)
        return normed @ head.T, normed if tiny.post_chain else x
