"""What a decoder's metadata says, checked. One reader for all architectures.

A key that changes the mathematics and is not known here is refused by name: a model that runs must run
as its authors computed it. Keys are those of GGUF files, which only lack the rope scaling type "dynamic".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.models.architecture import Architecture
from paceline.models.registry import architecture
from paceline.models.rope import VARIANTS, Rope

_READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "attention.scale",
    "attention.sliding_window", "attention.sliding_window_pattern",
    "attn_logit_softcapping", "final_logit_softcapping",
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm",
    "nextn_predict_layers",
}  # fmt: skip

_ONLY: dict[str, tuple[float, ...]] = {
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "expert_gating_func": (1,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
}
"""Keys that run only at the values with which they say nothing."""

_MOST = 2**16
"""Layers and head sizes beyond it are damage."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: of `count` feed-forward networks of size `hidden`, `used` run for a token.

    Attributes:
        normalised: the weights of the chosen ones are divided by their sum.
    """

    count: int
    used: int
    hidden: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a decoder.

    Attributes:
        hidden: width of the feed-forward network of layers without experts.
        context_length: most positions the model was made for.
        windows: of each layer, how many positions a row sees, its own included; 0 means all.
        rope, local_rope: of layers that see all, and of layers with a window.
        query_scale: what scores are multiplied by.
        attention_cap, logit_cap: scores and logits x become cap * tanh(x / cap); 0 means they stay.
    """

    architecture: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    windows: tuple[int, ...]
    rope: Rope
    local_rope: Rope
    query_scale: float
    attention_cap: float
    logit_cap: float
    experts: Experts | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> DecoderConfig:
        """Read `<architecture>.*`.

        Raises:
            ModelFileError: a value is missing or makes no sense.
            UnsupportedModelError: a setting that would change the mathematics and is not implemented.
        """
        keys = _Keys(metadata)
        family = architecture(keys.architecture)
        _refuse_unknown(keys)
        width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
        kv_heads = keys.count("attention.head_count_kv", heads)
        if heads % kv_heads or (width % heads and "attention.key_length" not in keys):
            raise ModelFileError(
                f"{heads} heads, {kv_heads} key-value heads and width {width} do not divide",
                "the file is damaged",
            )
        head_dim = keys.count("attention.key_length", width // heads, most=_MOST)
        if keys.count("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError("keys and values of different length", "no such model runs here yet")
        layers, context = keys.count("block_count", most=_MOST) - _heads(keys), keys.count("context_length")
        experts = _experts(keys)
        hidden = keys.count("feed_forward_length", experts.hidden if experts else None)
        rope = _rope(keys, head_dim, context)
        sizes = (width, hidden, experts.hidden if experts else hidden, heads * head_dim)
        _check_geometry(sizes, head_dim, rope.dim, heads // kv_heads, family)
        divided = width / heads if layers == family.wide_scale_layers else head_dim
        return cls(
            architecture=keys.architecture,
            layers=layers,
            width=width,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=context,
            norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            windows=_windows(keys, family, layers, context),
            rope=rope,
            local_rope=_local_rope(keys, family, rope),
            query_scale=keys.positive("attention.scale", 1.0 / math.sqrt(divided)),
            attention_cap=keys.positive_or_none("attn_logit_softcapping"),
            logit_cap=keys.positive_or_none("final_logit_softcapping"),
            experts=experts,
        )


def blocks_of_heads(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of tensors begin that belong to heads that draft, and not to the model."""
    keys = _Keys(metadata)
    blocks = keys.count("block_count", most=_MOST)
    return tuple(f"blk.{i}." for i in range(blocks - _heads(keys), blocks))


def _heads(keys: _Keys) -> int:
    """Blocks at the end that are heads which draft."""
    if not keys.values.get("nextn_predict_layers"):
        return 0
    return keys.count("nextn_predict_layers", most=keys.count("block_count", most=_MOST) - 1)


class _Keys:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.architecture = str(metadata["general.architecture"])
        prefix = self.architecture + "."
        self.values = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def count(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        value = self.values.get(name, default)
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self.architecture}.{name} differs from layer to layer", "no such model runs here yet"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ModelFileError(
                f"{self.architecture}.{name} is {str(value)[:60]}, not a whole number from 1 to {most}",
                "the file is damaged",
            )
        return value

    def positive_or_none(self, name: str) -> float:
        """A positive number, or 0 where the file has none."""
        return self.positive(name) if self.values.get(name) else 0.0

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ModelFileError(
                f"{self.architecture}.{name} is {str(value)[:60]}, not a positive number",
                "the file is damaged",
            )
        return float(value)


def _refuse_unknown(keys: _Keys) -> None:
    for name, value in keys.values.items():
        if name not in _READ and value not in _ONLY.get(name, ()):
            raise UnsupportedModelError(
                f"the model sets {keys.architecture}.{name} = {str(value)[:60]}, which is not known here",
                "running it without would change its text; update Paceline or use another conversion",
            )


def _check_geometry(
    widths: tuple[int, ...], head_dim: int, rope_dim: int, group: int, family: Architecture
) -> None:
    step = 32 if family.head_norm else 16
    if any(width % 32 for width in widths) or head_dim % step or group > 64:
        raise UnsupportedModelError(
            f"widths {', '.join(map(str, dict.fromkeys(widths)))}, head size {head_dim}, "
            f"{group} heads per key-value head",
            f"widths must be multiples of 32, head sizes of {step}, and at most 64 heads share keys",
        )
    if rope_dim % 2 or rope_dim > head_dim:
        raise ModelFileError(
            f"{rope_dim} of {head_dim} dimensions rotate", "give an even number up to the head size"
        )


def _windows(keys: _Keys, family: Architecture, layers: int, context: int) -> tuple[int, ...]:
    """A window in every layer, but for those that the pattern leaves out."""
    if not keys.values.get("attention.sliding_window"):
        return (0,) * layers
    window = keys.count("attention.sliding_window")
    if window >= context:
        return (0,) * layers
    pattern = keys.values.get("attention.sliding_window_pattern", family.window_period)
    if isinstance(pattern, list) and len(pattern) == layers and all(isinstance(p, bool) for p in pattern):
        return tuple(window if slides else 0 for slides in pattern)
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 0:
        raise ModelFileError(
            f"{keys.architecture}.attention.sliding_window_pattern is {str(pattern)[:60]}",
            f"it must be a period or {layers} truth values; the file is damaged",
        )
    return tuple(0 if pattern and i % pattern == 0 else window for i in range(1, layers + 1))


def _rope(keys: _Keys, head_dim: int, context: int) -> Rope:
    kind = keys.values.get("rope.scaling.type", "linear" if "rope.scale_linear" in keys else "none")
    if not isinstance(kind, str) or kind not in VARIANTS:
        raise UnsupportedModelError(
            f"rope scaling {str(kind)[:60]!r}", f"what runs here: {', '.join(VARIANTS)}"
        )
    original = keys.count("rope.scaling.original_context_length", context)
    stretched = max(1.0, context / original) if kind in ("yarn", "longrope") else 1.0
    factor = keys.positive("rope.scaling.factor", keys.values.get("rope.scale_linear", stretched))
    rope = Rope(
        base=keys.positive("rope.freq_base", 10000.0),
        dim=keys.count("rope.dimension_count", head_dim),
        kind=kind,
        factor=factor,
        original=original,
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    )
    if rope.base <= 1 or (kind != "none" and original < 2):
        raise ModelFileError(
            f"rope with base {rope.base:g}, first trained on {original} positions",
            "both must be above 1; the file is damaged",
        )
    if "rope.scaling.attn_factor" not in keys:
        return rope
    # llama.cpp, whose key it is, multiplies YaRN's own magnitude by it, and uses it alone elsewhere.
    own = rope.scale if kind == "yarn" else 1.0
    return replace(rope, magnitude=own * keys.positive("rope.scaling.attn_factor"))


def _local_rope(keys: _Keys, family: Architecture, rope: Rope) -> Rope:
    if "rope.freq_base_swa" not in keys and family.local_rope_base is None:
        return rope
    return Rope(base=keys.positive("rope.freq_base_swa", family.local_rope_base), dim=rope.dim)


def _experts(keys: _Keys) -> Experts | None:
    if not keys.values.get("expert_count"):
        return None
    count, used = keys.count("expert_count", most=_MOST), keys.count("expert_used_count")
    if used > count:
        raise ModelFileError(f"{used} of {count} experts are used", "the file is damaged")
    hidden = keys.count("expert_feed_forward_length", keys.values.get("feed_forward_length"))
    normalised = keys.values.get("expert_weights_norm", True)
    if not isinstance(normalised, bool):
        raise ModelFileError(
            f"{keys.architecture}.expert_weights_norm is {str(normalised)[:60]}, neither true nor false",
            "the file is damaged",
        )
    return Experts(count, used, hidden, normalised)
