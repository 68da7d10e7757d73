"""The decoder layers of a head, as its settings and its tensors describe them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.core import is_whole
from paceline.drafters.checkpoint import Checkpoint
from paceline.errors import UnsupportedModelError
from paceline.models.config import DecoderConfig
from paceline.weights import hf_rope

_GGUF = {
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
_CONTEXT = 2048
"""Positions that SafeAILab's heads are made for, where nothing is said."""


def decoder_config(found: Checkpoint) -> DecoderConfig:
    """Sizes of a head's layers; tensors decide where settings could be wrong.

    Factors of the rope's frequencies that follow from settings become a tensor of the checkpoint, as GGUF
    files have it.

    Raises:
        ModelFileError, UnsupportedModelError: settings are missing, or ask for what does not run here.
    """
    width = found.shape("blk.0.attn_output.weight")[0]
    hidden = found.shape("blk.0.ffn_gate.weight")[0]
    head_norm = found.has("blk.0.attn_q_norm.weight")
    if head_norm and found.interleaved:
        raise found.fault("normalised queries in an order that only Llama has", "convert it again")
    heads = _count(found, "num_attention_heads", "attention.head_count")
    inner, keys = found.shape("blk.0.attn_output.weight")[1], found.shape("blk.0.attn_k.weight")[0]
    if inner % heads or keys % (inner // heads):
        raise found.fault(
            f"{heads} heads for queries of {inner} and keys of {keys} dimensions",
            "its settings are another head's",
        )
    head = inner // heads
    family = "llama" if found.interleaved else "qwen3" if head_norm else "qwen2"
    values: dict[str, Any] = {
        "context_length": _count(found, "max_position_embeddings", "context_length", default=_CONTEXT),
        "embedding_length": width,
        "block_count": found.layer_count(),
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": keys // head,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(
            found.setting("rms_norm_eps", "attention.layer_norm_rms_epsilon", default=1e-6)
        ),
    }
    if found.layout == "GGUF":
        values |= {name: found.settings[name] for name in _GGUF if name in found.settings}
    else:
        values |= hf_rope.translate(found.settings, head)
    if found.layout != "GGUF":
        for name, factors in hf_rope.tensors(found.settings, head).items():
            found.add(name, factors)
    named = {f"{family}.{name}": value for name, value in values.items()}
    config = DecoderConfig.from_metadata({"general.architecture": family, **named})
    if found.kind in ("eagle3", "peagle") and found.layout == "speculators":
        config = replace(config, windows=windows(found, config.layers))
    return config


def layer_kinds(found: Checkpoint, layers: int) -> list[str]:
    """Of each layer, whether it attends to all or within a window.

    Raises:
        ModelFileError, UnsupportedModelError: the settings name other layers, or others than these two.
    """
    kinds = found.setting("layer_types")
    if kinds is None:
        return [FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise found.fault(f"its layer_types are not {layers} names", "its settings are another head's")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise UnsupportedModelError(
                f"{found.path}: a layer of type {str(kind)[:40]!r}", "full and sliding attention run here"
            )
    return kinds


def windows(found: Checkpoint, layers: int) -> tuple[int, ...]:
    """Of each layer, how many positions a row sees, its own included; 0 means all.

    So SpecForge trains them and vLLM runs them. speculators trains the slots of a block, and the steps of a
    head, with one common window, that of the text's last row.
    """
    kinds = layer_kinds(found, layers)
    window = _count(found, "sliding_window") if SLIDING in kinds else 0
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _count(found: Checkpoint, *names: str, default: int | None = None) -> int:
    value = found.setting(*names, default=default)
    if not is_whole(value) or value < 1:
        raise found.fault(
            f"{names[0]} is {str(value)[:60]}, not a positive whole number", "correct its config.json"
        )
    return value
