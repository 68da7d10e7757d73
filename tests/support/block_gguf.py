"""Block drafters in GGUF files, named and keyed as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.block_heads import GONE, TinyHead
from support.gguf_writer import LAYER_NAMES, Tensor, write_gguf

_OUTER = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def write_block_gguf(
    path: Path,
    head: TinyHead,
    *,
    first: bool,
    causal: bool = False,
    keys: Mapping[str, Any] | None = None,
    more: Mapping[str, Tensor] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write what the converter would make of a checkpoint.

    Args:
        first: whether the anchor's slot predicts.
        keys: departures of the metadata, without "dflash." where that begins them; GONE takes one away.
        more, without: tensors to add and to leave out.
    """
    sparks = head.markov is not None or head.confidence is not None
    written: dict[str, Any] = {
        "block_count": head.layers,
        "context_length": 2048,
        "embedding_length": head.width,
        "feed_forward_length": head.hidden,
        "attention.head_count": head.heads,
        "attention.head_count_kv": head.kv_heads,
        "attention.key_length": head.head_dim,
        "attention.value_length": head.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": head.theta,
        "block_size": head.block,
        "target_layers": [tap + 1 for tap in head.taps],
        "sample_from_anchor": first,
    }
    if causal:
        written["attention.causal"] = True
    if sparks:
        written["has_confidence_head"] = head.confidence is not None
    if head.sliding:
        written["attention.sliding_window"] = head.window
        written["attention.sliding_window_pattern"] = [i in head.sliding for i in range(head.layers)]
    metadata: dict[str, Any] = {
        "general.architecture": "dflash",
        "tokenizer.ggml.mask_token_id": head.mask,
        "tokenizer.ggml.tokens": [str(i) for i in range(head.vocab)],
        **{f"dflash.{key}": value for key, value in written.items()},
    }
    for key, value in (keys or {}).items():
        metadata[key if key.startswith("tokenizer.") else f"dflash.{key}"] = value
    tensors = {_renamed(name): Tensor.of(values) for name, values in head.arrays().items()}
    if "d2t" in head.mapping():
        offsets = head.mapping()["d2t"]
        tensors["d2t"] = Tensor.ids(offsets + np.arange(len(offsets)))
    kept = {name: tensor for name, tensor in {**tensors, **(more or {})}.items() if name not in without}
    return write_gguf(path, {k: v for k, v in metadata.items() if v is not GONE}, kept)


def _renamed(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if part in _OUTER:
        return f"{_OUTER[part]}.{kind}"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", part)
    assert match is not None, name
    return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{kind}"
