"""Tensor names of Hugging Face folders, and how each becomes the tensor a GGUF file of the model has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Floats
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.weights import hf_rope
from paceline.weights.hf_config import Family, family, tied
from paceline.weights.hf_files import DOWNLOAD
from paceline.weights.quants import TensorType
from paceline.weights.safetensors import Entry

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # GGUF too keeps Phi 3's pair in one
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Gemma normalises before and after, and its name for the norm after attention is Llama's for another."""

_EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_IN_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.(.+)\.(weight|bias)", re.ASCII)
_OF_EXPERT = re.compile(r"mlp\.experts\.(\d{1,5})\.(\w+)", re.ASCII)
_BUFFER = re.compile(r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias)")
"""What old checkpoints hold beside weights; it follows from the configuration."""

_HEAD = re.compile(r"(model\.)?mtp(_layers)?\..+")
"""Tensors of heads that draft, which are no part of the model."""

_TYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one tensor is made from the arrays of a folder.

    Attributes:
        parts: names of the arrays; several are stacked along a new first axis.
        type: of every array.
        shape: of the tensor.
        order: [rows] which row comes in each place, None for the order there is.
        plus_one: one is added to each value.
        values: contents that follow from the configuration instead of from arrays.
    """

    parts: tuple[str, ...]
    type: TensorType
    shape: tuple[int, ...]
    order: NDArray[np.intp] | None = None
    plus_one: bool = False
    values: Floats | None = None


def recipes(arrays: Mapping[str, Entry], settings: Mapping[str, Any], head: int) -> dict[str, Recipe]:
    """The tensors that the arrays of a folder make, by GGUF's names.

    Args:
        settings: config.json, known to be sound.
        head: dimensions of an attention head.

    Raises:
        ModelFileError: arrays are missing or do not fit together.
        UnsupportedModelError: an array that no name is known for, or of a type that does not run here.
    """
    groups = _grouped(arrays, settings)
    found = {name: _recipe(name, group, arrays, settings, head) for name, group in groups.items()}
    for name, values in hf_rope.tensors(settings, head).items():
        found[name] = Recipe((), TensorType.F32, values.shape, values=values)
    if not tied(settings) and "output.weight" not in found:
        raise ModelFileError("the folder has no lm_head.weight, and its head is not tied", DOWNLOAD)
    return found


def _grouped(arrays: Mapping[str, Entry], settings: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Each tensor's arrays by their place in it: one, or one per expert."""
    groups: defaultdict[str, dict[int, str]] = defaultdict(dict)
    unknown: list[str] = []
    layer_names = {**LAYER, **(_SANDWICH if family(settings).plus_one else {})}
    head_follows = tied(settings)
    for name in arrays:
        place = ("", 0) if _of_head(name, settings) else _place(name, layer_names)
        if place is None:
            unknown.append(name)
        elif place[0] == "output.weight" and head_follows:
            continue  # some folders store the embedding a second time
        elif place[0]:
            groups[place[0]][place[1]] = name
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        shown = ", ".join(map(repr, unknown[:3])) + more
        raise UnsupportedModelError(
            f"the folder has tensors that are not known here: {shown}",
            "without them the model would write other text; update Paceline or use another conversion",
        )
    return groups


def _of_head(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether an array belongs to a head that drafts; DeepSeek's way is to number it as a layer more."""
    if _HEAD.fullmatch(name):
        return True
    match = _IN_LAYER.fullmatch(name)
    return (
        match is not None
        and bool(settings.get("num_nextn_predict_layers"))
        and int(match[1]) >= int(settings["num_hidden_layers"])
    )


def _place(name: str, layer_names: Mapping[str, str]) -> tuple[str, int] | None:
    """The tensor an array belongs to, and its place in it; "" for what is not needed, None if unknown."""
    if name in _OUTER:
        return _OUTER[name], 0
    if _BUFFER.fullmatch(name):
        return "", 0
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if part in layer_names:
        return f"blk.{int(layer)}.{layer_names[part]}.{kind}", 0
    expert = _OF_EXPERT.fullmatch(part)
    if expert is None or expert[2] not in _EXPERT:
        return None
    return f"blk.{int(layer)}.{_EXPERT[expert[2]]}.{kind}", int(expert[1])


def _recipe(
    name: str, group: Mapping[int, str], arrays: Mapping[str, Entry], settings: Mapping[str, Any], head: int
) -> Recipe:
    parts = tuple(group[i] for i in sorted(group))
    first = arrays[parts[0]]
    if first.dtype not in _TYPES:
        raise UnsupportedModelError(
            f"tensor {first.name!r} has dtype {first.dtype}",
            f"{', '.join(_TYPES)} run here; take the folder of the unquantised model, or a GGUF file",
        )
    stacked = "_exps." in name
    if stacked and sorted(group) != list(range(len(group))):
        missing = next(i for i in range(max(group)) if i not in group)
        raise ModelFileError(f"expert {missing} of {name} is missing", DOWNLOAD)
    for part in parts:
        if (arrays[part].dtype, arrays[part].shape) != (first.dtype, first.shape):
            raise ModelFileError(f"{part!r} and {parts[0]!r} differ in dtype or shape", DOWNLOAD)
    shape = (len(parts), *first.shape) if stacked else first.shape
    if not shape or 0 in shape:
        raise ModelFileError(f"tensor {first.name!r} of shape {first.shape} has no elements", DOWNLOAD)
    ours = family(settings)
    return Recipe(
        parts,
        _TYPES[first.dtype],
        shape,
        order=_order(name, first.shape[0], settings, head, ours),
        plus_one=ours.plus_one and name.split(".")[-2].endswith("norm"),
    )


def _order(
    name: str, rows: int, settings: Mapping[str, Any], head: int, ours: Family
) -> NDArray[np.intp] | None:
    """Rows of query and key as GGUF has them for Llama: the two that rope turns together side by side."""
    if not ours.permuted or name.split(".")[-2] not in ("attn_q", "attn_k") or rows % head:
        return None
    turning = hf_rope.turning(settings, head)
    within = np.arange(head)
    within[:turning] = np.arange(turning).reshape(2, -1).T.reshape(-1)
    return (np.arange(0, rows, head)[:, None] + within).reshape(-1)
