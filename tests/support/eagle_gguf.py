"""EAGLE-3 heads in GGUF files, named and keyed as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.gguf_writer import Tensor, write_gguf
from support.tiny_heads import Array, TinyHead

_NAMES = {
    "fc.weight": "fc.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_norm.weight": "enc.output_norm.weight",
}


def _interleaved(rows: Array, head: int) -> Array:
    """Rows of query or key as llama.cpp's converter puts them: the two that turn together side by side."""
    heads = rows.reshape(-1, 2, head // 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def write_eagle3_gguf(
    path: Path, tiny: TinyHead, d2t: Array | None, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write what the converter would make of a head; `metadata` is a tokenizer's."""
    tensors = {}
    for name, values in tiny.arrays().items():
        if "q_proj" in name or "k_proj" in name:
            values = _interleaved(values, tiny.head_dim)
        tensors[_NAMES[name]] = Tensor.of(values)
    if d2t is not None:
        tensors["d2t"] = Tensor.ids(d2t)
    found: dict[str, Any] = {
        "block_count": 1,
        "embedding_length": tiny.width,
        "feed_forward_length": tiny.hidden,
        "target_layers": list(tiny.taps),
        "target_hidden_size": tiny.width,
        "norm_before_residual": tiny.norm_before_residual,
        "norm_before_fc": tiny.norm_before_fc,
        "attention.head_count": tiny.heads,
        "attention.head_count_kv": tiny.kv_heads,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "context_length": 2048,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": tiny.head_dim,
    }
    named = {f"eagle3.{key}": value for key, value in found.items()}
    return write_gguf(path, {"general.architecture": "eagle3", **named, **dict(metadata or {})}, tensors)
