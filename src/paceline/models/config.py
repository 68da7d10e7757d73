"""What a decoder's metadata says, checked. One reader for all dense architectures.

A key that changes the mathematics and is not known here is refused by name: a model that runs must run
as its authors computed it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError

_READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "attention.sliding_window",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count", "expert_used_count",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a dense decoder.

    Attributes:
        context_length: most positions the model was made for; a sliding window caps it, since within one
            window sliding and full attention are the same.
        rope_dim: dimensions of a head that rotate.
        rope_factor: positions are divided by it (linear scaling).
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
    rope_base: float
    rope_dim: int
    rope_factor: float

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> DecoderConfig:
        """Read `<architecture>.*`.

        Raises:
            ModelFileError: a value is missing or makes no sense.
            UnsupportedModelError: a setting that would change the mathematics and is not implemented.
        """
        keys = _Keys(metadata)
        _refuse_unknown(keys)
        width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
        kv_heads = keys.count("attention.head_count_kv", heads)
        if heads % kv_heads or (width % heads and "attention.key_length" not in keys):
            raise ModelFileError(
                f"{heads} heads, {kv_heads} key-value heads and width {width} do not divide",
                "the file is damaged",
            )
        head_dim = keys.count("attention.key_length", width // heads)
        if keys.count("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError("keys and values of different length", "no such model runs here yet")
        rope_dim = keys.count("rope.dimension_count", head_dim)
        hidden = keys.count("feed_forward_length")
        _check_geometry((width, hidden, heads * head_dim), head_dim, rope_dim, heads // kv_heads)
        context = keys.count("context_length")
        window = keys.count("attention.sliding_window", context)
        return cls(
            architecture=keys.architecture,
            layers=keys.count("block_count"),
            width=width,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=min(context, window),
            norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            rope_base=keys.positive("rope.freq_base", 10000.0),
            rope_dim=rope_dim,
            rope_factor=_linear_factor(keys),
        )

    def rope_frequencies(self, factors: list[float] | None = None) -> list[float]:
        """Angle per position of each rotating pair [rope_dim / 2]; `factors` divide it (Llama 3)."""
        half = self.rope_dim // 2
        plain = [self.rope_base ** (-2.0 * i / self.rope_dim) / self.rope_factor for i in range(half)]
        return plain if factors is None else [f / by for f, by in zip(plain, factors, strict=True)]


class _Keys:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.architecture = str(metadata["general.architecture"])
        prefix = self.architecture + "."
        self.values = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self.architecture}.{name} differs from layer to layer", "no such model runs here yet"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31 - 1:
            raise ModelFileError(
                f"{self.architecture}.{name} is {str(value)[:60]}, not a positive whole number",
                "the file is damaged",
            )
        return value

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
        if name not in _READ:
            raise UnsupportedModelError(
                f"the model sets {keys.architecture}.{name} = {str(value)[:60]}, which is not known here",
                "running it without would change its text; update Paceline or use another conversion",
            )
    if keys.values.get("expert_count"):
        raise UnsupportedModelError(
            f"the model has {keys.values['expert_count']} experts per layer",
            "mixtures of experts do not run here yet",
        )


def _check_geometry(widths: tuple[int, int, int], head_dim: int, rope_dim: int, group: int) -> None:
    if any(width % 32 for width in widths) or head_dim % 16 or group > 64:
        raise UnsupportedModelError(
            f"widths {', '.join(map(str, widths))}, head size {head_dim}, {group} heads per key-value head",
            "widths must be multiples of 32, head sizes of 16, and at most 64 heads share keys",
        )
    if rope_dim % 2 or rope_dim > head_dim:
        raise ModelFileError(
            f"{rope_dim} of {head_dim} dimensions rotate", "give an even number up to the head size"
        )


def _linear_factor(keys: _Keys) -> float:
    kind = keys.values.get("rope.scaling.type", "linear" if "rope.scale_linear" in keys else "none")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise UnsupportedModelError(
            f"rope scaling {kind!r}", "only none, linear and Llama 3 factors run here yet"
        )
    return keys.positive("rope.scaling.factor", keys.values.get("rope.scale_linear", 1.0))
