"""Rotary embeddings as config.json describes them, in the terms of GGUF.

Two spellings are read: `rope_theta` with `rope_scaling`, and since transformers 5 `rope_parameters`, which
Gemma gives once per kind of layer. Scalings that divide each frequency by its own factor (Llama 3, LongRoPE)
become the tensors that converters write for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core import Floats
from paceline.errors import ModelFileError, UnsupportedModelError, suggest
from paceline.weights.hf_files import DOWNLOAD

Settings = Mapping[str, Any]

READ = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor",
    "original_max_position_embeddings",
)  # fmt: skip

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KNOWN: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "finetuned",
    },
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "longrope": {
        "short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings",
    },
}  # fmt: skip
"""What each kind of scaling is told; anything else is refused by name."""

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_LOCAL_BASE = 10000.0


def translate(settings: Settings, head: int) -> dict[str, Any]:
    """`rope.*` metadata, without the architecture in front, for heads of `head` dimensions.

    Raises:
        ModelFileError: a value is missing or makes no sense.
        UnsupportedModelError: a scaling, or a setting of one, that is not known; by name.
    """
    rope = _parameters(settings)
    kind = _kind(rope)
    values: dict[str, Any] = {"rope.freq_base": positive(rope, "rope_theta", 10000.0)}
    if (turns := turning(settings, head)) != head:
        values["rope.dimension_count"] = turns
    if (local := _local_base(settings)) != _LOCAL_BASE:
        values["rope.freq_base_swa"] = local
    if kind in ("linear", "dynamic", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": positive(rope, "factor")}
    if kind in ("dynamic", "yarn", "longrope"):
        values["rope.scaling.original_context_length"] = int(_original(settings, rope))
    if kind == "yarn":
        values |= _yarn(rope)
    if kind == "longrope":
        values |= {"rope.scaling.type": kind, "rope.scaling.attn_factor": _long_magnitude(settings, rope)}
    return values


def tensors(settings: Settings, head: int) -> dict[str, Floats]:
    """The factors [turning / 2] that divide each pair's frequency, under the names converters give them."""
    rope, turns = _parameters(settings), turning(settings, head)
    kind = _kind(rope)
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3(settings, rope, turns)}
    if kind == "longrope":
        return {
            f"rope_factors_{name}.weight": _factors(rope, f"{name}_factor", turns // 2)
            for name in ("long", "short")
        }
    return {}


def turning(settings: Settings, head: int) -> int:
    """How many of a head's dimensions rotate."""
    count = int(head * positive(_parameters(settings), "partial_rotary_factor", 1.0))
    if count % 2 or not 2 <= count <= head:
        raise ModelFileError(f"config.json lets {count} of {head} dimensions rotate", DOWNLOAD)
    return count


def positive(settings: Settings, name: str, default: float | None = None) -> float:
    """A setting that must be a positive finite number."""
    value = settings.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelFileError(
            f"config.json has {name} = {str(value)[:60]}, not a positive number",
            DOWNLOAD,
        )
    return float(value)


def _parameters(settings: Settings) -> dict[str, Any]:
    """The parameters of the layers that see everything, in the new spelling, their keys checked."""
    outer = {name: settings[name] for name in ("rope_theta", "partial_rotary_factor") if name in settings}
    given = settings.get("rope_parameters")
    if given is None:
        given = settings.get("rope_scaling")
    if isinstance(given, Mapping) and _GLOBAL in given:
        given = given[_GLOBAL]
    if given is not None and not isinstance(given, Mapping):
        raise ModelFileError(f"config.json's rope settings are {str(given)[:60]}, not an object", DOWNLOAD)
    rope = {**outer, **(given or {})}
    unknown = set(rope) - _ALWAYS - _KNOWN[_kind(rope)]
    if unknown:
        raise UnsupportedModelError(
            f"config.json sets {min(unknown)} for {_kind(rope)} rope, which is not known here",
            "running the model without would change its text; update Paceline or use another conversion",
        )
    return rope


def _kind(rope: Settings) -> str:
    kind = rope.get("rope_type", rope.get("type")) or "default"
    kind = {"su": "longrope", "ntk": "dynamic"}.get(str(kind), kind)
    if kind not in _KNOWN:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} does not run here", suggest(str(kind), list(_KNOWN))
        )
    return str(kind)


def _local_base(settings: Settings) -> float:
    """The base of layers with a sliding window, where it is another."""
    given = settings.get("rope_parameters")
    if isinstance(given, Mapping) and isinstance(given.get(_LOCAL), Mapping):
        if _kind(given[_LOCAL]) != "default":
            raise UnsupportedModelError(
                "rope scaling on layers with a sliding window", "that does not run here"
            )
        return positive(given[_LOCAL], "rope_theta", _LOCAL_BASE)
    return positive(settings, "rope_local_base_freq", _LOCAL_BASE)


def _original(settings: Settings, rope: Settings) -> float:
    """Positions the model had before it was stretched."""
    for where in (rope, settings):
        if where.get("original_max_position_embeddings") is not None:
            return positive(where, "original_max_position_embeddings")
    return positive(settings, "max_position_embeddings")


def _yarn(rope: Settings) -> dict[str, Any]:
    """What departs from the customary values of YaRN (Peng et al. 2023)."""
    if rope.get("truncate", True) is not True:
        raise UnsupportedModelError("yarn rope with truncate = false", "that does not run here yet")
    values = {
        f"rope.scaling.yarn_{name}": positive(rope, name)
        for name in ("beta_fast", "beta_slow")
        if rope.get(name) is not None
    }
    factor = positive(rope, "factor")
    customary = _magnitude(factor, 1.0)
    magnitude = customary
    if rope.get("attention_factor") is not None:
        magnitude = positive(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        magnitude = _magnitude(factor, positive(rope, "mscale")) / _magnitude(
            factor, positive(rope, "mscale_all_dim")
        )
    if magnitude != customary:  # in GGUF it multiplies the customary one
        values["rope.scaling.attn_factor"] = magnitude / customary
    return values


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _long_magnitude(settings: Settings, rope: Settings) -> float:
    """LongRoPE's scale of sines and cosines (Ding et al. 2024)."""
    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor")
    original = _original(settings, rope)
    factor = positive(rope, "factor", positive(settings, "max_position_embeddings") / original)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(settings: Settings, rope: Settings, turns: int) -> Floats:
    """Llama 3.1's factors: none for short waves, all of it for long ones, a blend between."""
    factor = positive(rope, "factor")
    low, high = positive(rope, "low_freq_factor"), positive(rope, "high_freq_factor")
    if high <= low:
        raise ModelFileError(f"config.json has low_freq_factor {low} and high_freq_factor {high}", DOWNLOAD)
    exponents = np.arange(0, turns, 2) / turns
    waves = 2 * math.pi * positive(rope, "rope_theta", 10000.0) ** exponents
    rounds = _original(settings, rope) / waves  # over the original context
    blend = np.clip((rounds - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend), np.float32)


def _factors(rope: Settings, name: str, count: int) -> Floats:
    values = rope.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise ModelFileError(
            f"config.json's {name} is {str(values)[:40]}, not a list of {count} numbers",
            DOWNLOAD,
        )
    return np.array([positive({name: value}, name) for value in values], np.float32)
