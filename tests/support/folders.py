"""Random Hugging Face folders of every family, small enough to run in microseconds."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.vocabularies import byte_characters

Array = NDArray[Any]
DTYPES = {"F32": np.float32, "F16": np.float16}


def bf16(values: Array) -> Array:
    """Round float32 to the nearest bfloat16, as its 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encoded(values: Array, dtype: str) -> tuple[str, tuple[int, ...], bytes]:
    """An array as it lies in a file: dtype, shape, bytes."""
    stored = bf16(values) if dtype == "BF16" else values.astype(DTYPES[dtype])
    return dtype, values.shape, stored.tobytes()


def safetensors_bytes(
    arrays: Mapping[str, tuple[str, tuple[int, ...], bytes]], *, header: Mapping[str, Any] | None = None
) -> bytes:
    """A safetensors file; `header` replaces entries of the header."""
    described: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, raw) in arrays.items():
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(described | dict(header or {})).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in arrays.values())


def tiny_tokenizer_json(size: int = 258) -> dict[str, Any]:
    """A byte-level tokenizer: id = byte, then <s> and </s>."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {text: i for i, text in enumerate(byte_characters()) if i < size}
    return {
        "version": "1.0",
        "added_tokens": [added(i, text) for i, text in ((256, "<s>"), (257, "</s>")) if i < size],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def added(number: int, text: str, *, special: bool = True, **more: Any) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, "special": special, **plain, **more}


@dataclass(frozen=True, kw_only=True)
class TinyFolder:
    """What a random folder holds.

    Attributes:
        settings: departures of config.json from the family's own.
        seed: of the weights.
    """

    family: str = "llama"
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "F32"
    seed: int = 0

    def config(self) -> dict[str, Any]:
        common = {
            "model_type": self.family,
            "vocab_size": 258,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": None,
        }
        return {**common, **OF_FAMILY[self.family], **self.settings}

    def arrays(self) -> dict[str, Array]:
        """Weights in float32 by their names in the folder; numpy keeps its streams between versions."""
        rng = np.random.default_rng(self.seed)
        return {name: self._values(rng, name, shape) for name, shape in self.shapes().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.config()
        width, vocab = config["hidden_size"], config["vocab_size"]
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
        for layer in range(config["num_hidden_layers"]):
            found |= {f"model.layers.{layer}.{name}": s for name, s in self._layer(config).items()}
        found["model.norm.weight"] = (width,)
        if not config["tie_word_embeddings"]:
            found["lm_head.weight"] = (vocab, width)
        return found

    def write(self, path: Path, *, shards: int = 1) -> Path:
        """Write the folder and return its path."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config()))
        (path / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json(self.config()["vocab_size"])))
        stored = {name: encoded(values, self.dtype) for name, values in self.arrays().items()}
        if shards == 1:
            (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
            return path
        where = {
            name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(stored)
        }
        for file in set(where.values()):
            part = {name: entry for name, entry in stored.items() if where[name] == file}
            (path / file).write_bytes(safetensors_bytes(part))
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return path

    def _values(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
        if "norm" in name:
            middle = 0.0 if self.family == "gemma3_text" else 1.0
            return (middle + rng.uniform(-0.5, 0.5, shape)).astype(np.float32)
        if len(shape) == 1:
            return rng.uniform(-0.5, 0.5, shape).astype(np.float32)
        # The vocabulary's two as transformers begins them, the rest large enough to matter.
        vocabulary = shape[0] == self.config()["vocab_size"]
        scale = 0.02 if vocabulary else 1.0 / math.sqrt(shape[-1])
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def _layer(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        width = config["hidden_size"]
        head = config["head_dim"] or width // config["num_attention_heads"]
        inner, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        projections = {"q_proj": inner, "k_proj": kv, "v_proj": kv}
        found: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}
        if self.family == "phi3":
            found["self_attn.qkv_proj.weight"] = (inner + 2 * kv, width)
        else:
            found |= {f"self_attn.{name}.weight": (size, width) for name, size in projections.items()}
        if self.family in ("qwen2", "mimo"):
            found |= {f"self_attn.{name}.bias": (size,) for name, size in projections.items()}
        if self.family in ("qwen3", "qwen3_moe", "gemma3_text"):
            found |= {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        found["self_attn.o_proj.weight"] = (width, inner)
        found["post_attention_layernorm.weight"] = (width,)
        if self.family == "gemma3_text":
            found |= {f"{side}_feedforward_layernorm.weight": (width,) for side in ("pre", "post")}
        return found | self._feed_forward(config, width)

    def _feed_forward(self, config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
        hidden = config["intermediate_size"]
        if self.family == "phi3":
            return {"mlp.gate_up_proj.weight": (2 * hidden, width), "mlp.down_proj.weight": (width, hidden)}
        if self.family != "qwen3_moe":
            return {
                "mlp.gate_proj.weight": (hidden, width),
                "mlp.up_proj.weight": (hidden, width),
                "mlp.down_proj.weight": (width, hidden),
            }
        small = config["moe_intermediate_size"]
        found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (config["num_experts"], width)}
        for expert in range(config["num_experts"]):
            at = f"mlp.experts.{expert}."
            found |= {at + "gate_proj.weight": (small, width), at + "up_proj.weight": (small, width)}
            found[at + "down_proj.weight"] = (width, small)
        return found


OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "mimo": {"num_nextn_predict_layers": 1},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_hidden_layers": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"sliding_window": None, "pad_token_id": 0, "num_attention_heads": 2, "num_key_value_heads": 1},
}
"""What each family's config.json says besides."""
