"""What a drafter in safetensors is, by its keys and tensors, and what its tensors are called here.

Public checkpoints name the same things differently, and some names promise what the tensors do not hold; so
the tensors decide. Names here are those of llama.cpp's GGUF drafters: `fc`, `blk.N.*`, `output_norm`, `d2t`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.drafters.checkpoint_arrays import Array
from paceline.weights.hf_tensors import LAYER


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the decoder's own settings on the outer level."""
    found = dict(settings)
    for name in ("transformer_layer_config", "text_config"):
        inner = found.pop(name, None)
        if isinstance(inner, Mapping):
            found = {**inner, **found}
    return found


def recognise(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The kind of a checkpoint, by what it holds rather than by what it is called.

    Returns:
        "eagle3", "eagle", "mtp", "dflash", "dspark", a key of the kinds that are refused, or "" if unknown.
    """
    if any(name.removeprefix("model.") == "mask_hidden" for name in shapes):
        return "peagle"
    named = str(settings.get("speculators_model_type") or "")
    if named:
        return named
    made = " ".join(map(str, settings.get("architectures") or ()))
    for name in ("DFlash2", "PEagle", "DSpark", "DFlash"):
        if name in made:
            return name.lower()
    if any(name.startswith("markov") or ".markov" in name for name in shapes):
        return "dspark"
    fuse = shapes.get("fc.weight")
    if fuse is not None and len(fuse) == 2:
        return _fused(settings, shapes, fuse)
    if any(_mtp_place(name, settings) for name in shapes):
        return "mtp"
    for pattern, kind in _BY_NAME.items():
        if any(re.match(pattern, name) for name in shapes):
            return kind
    return ""


_BY_NAME = {
    r"medusa_|medusa_lm_head\.|\d+\.\d+\.linear\.weight|blocks\.": "medusa",
    r"emb\.0|speculator\.emb\.": "mlp",
    r"forget_emb\.0": "lstm",
    r"model\.layers\.0\.": "model",
}


def _fused(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], fuse: tuple[int, ...]) -> str:
    """Tell apart heads that have a matrix `fc`."""
    width = fuse[0]
    for first in ("midlayer", "layers.0"):
        query = shapes.get(f"{first}.self_attn.q_proj.weight")
        if query is not None and query[1] == 2 * width:
            return "eagle3"
    if "hidden_norm.weight" in shapes and "layers.0.input_layernorm.weight" in shapes:
        return "dflash"
    if fuse[1] == 2 * width and "layers.0.input_layernorm.weight" not in shapes:
        return "eagle"
    return "eagle3" if settings.get("draft_vocab_size") else ""


def layout_of(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], kind: str) -> str:
    """Whose way of writing it down this is."""
    made = " ".join(map(str, settings.get("architectures") or ()))
    if settings.get("speculators_model_type"):
        return "speculators"
    if kind in ("dflash", "dspark"):
        return "z-lab" if settings.get("dflash_config") or kind == "dflash" else "DeepSpec"
    if kind == "mtp":
        return next((found[0] for name in shapes if (found := _mtp_place(name, settings))), "MTP")
    if "eagle_config" in settings or "ForCausalLMEagle3" in made or "PEagleDraftModel" in made:
        return "SpecForge"
    if "target_layer_ids" in settings:
        return "DeepSpec" if kind in ("eagle3", "dspark") else "z-lab"
    return "vLLM" if kind == "eagle3" and "midlayer.self_attn.q_proj.weight" not in shapes else "SafeAILab"


_OUTER = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "mask_hidden": "mask_hidden",
    "d2t": "d2t",
    "draft_id_to_target_id": "d2t",
}
_LAYER = {**LAYER, "hidden_norm": "attn_norm_2"}
_SKIPPED = re.compile(r"t2d|.*rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
_IN_LAYER = re.compile(r"(?:layers\.(\d+)|midlayer)\.([\w.]+)\.(weight|bias)")
_CHAIN = re.compile(
    r"(?:markov_head\.(?:markov_w1|markov_w2|gate_proj|joint_proj)|confidence_head\.proj)\.(?:weight|bias)"
)
_FC_NORM = re.compile(r"fc_norm\.(\d)\.weight")


def plain_name(name: str) -> str | None:
    """The name here of a tensor of EAGLE, EAGLE-3 and DFlash checkpoints; "" for one not needed."""
    name = name.removeprefix("model.").removeprefix("logit_head.")
    if name in _OUTER:
        return _OUTER[name]
    if _SKIPPED.fullmatch(name):
        return ""
    if _FC_NORM.fullmatch(name) or _CHAIN.fullmatch(name):
        return name
    match = _IN_LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"blk.{int(match[1] or 0)}.{_LAYER[match[2]]}.{match[3]}"


_NEXTN = {
    "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head", "embed_tokens": "embed_tokens",
    "input_proj": "eh_proj", "token_layernorm": "enorm", "hidden_layernorm": "hnorm",
    "final_layernorm": "shared_head_norm",
}  # fmt: skip
_QWEN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
_MTP_LAYER = {**LAYER, "pre_mlp_layernorm": "ffn_norm"}
_MTP = (
    ("Qwen", re.compile(r"mtp\.(?:layers\.(\d+)\.)?([\w.]+)\.(weight|bias)")),
    ("MiMo", re.compile(r"model\.mtp_layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
    ("speculators", re.compile(r"mtp_layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
    ("MiMo V2", re.compile(r"model\.mtp\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
    ("DeepSeek", re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
)


def _mtp_place(name: str, settings: Mapping[str, Any]) -> tuple[str, int, str, str] | None:
    """(layout, head, name within the layer, "weight" or "bias") of a tensor of an MTP head."""
    for layout, pattern in _MTP:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        index = int(match[1] or 0)
        if layout == "DeepSeek":
            index -= int(settings.get("num_hidden_layers") or 0)
            if index < 0 or not settings.get("num_hidden_layers"):
                return None
        return layout, index, match[2], match[3]
    return None


def _mtp_name(name: str, settings: Mapping[str, Any]) -> str | None:
    place = _mtp_place(name, settings)
    if place is None:
        return None
    layout, index, part, kind = place
    if layout == "Qwen" and part in _QWEN and not name.startswith("mtp.layers"):
        return f"blk.0.nextn.{_QWEN[part]}.{kind}"
    if part in _NEXTN:
        return f"blk.{index}.nextn.{_NEXTN[part]}.{kind}"
    return f"blk.{index}.{_MTP_LAYER.get(part, part)}.{kind}"


Rename = Callable[[str, Mapping[str, Any]], str | None]

KINDS: dict[str, Rename] = {
    "eagle3": lambda name, _: plain_name(name),
    "peagle": lambda name, _: plain_name(name),
    "eagle": lambda name, _: plain_name(name),
    "mtp": _mtp_name,
    "dflash": lambda name, _: plain_name(name),
    "dspark": lambda name, _: plain_name(name),
}
"""Kinds that run, and how the names of their tensors are read; None for a name that is not known."""


def renamed(
    arrays: Mapping[str, Array], kind: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Array], list[str]]:
    """Arrays by the names here, and the names that mean nothing."""
    named: dict[str, Array] = {}
    left: list[str] = []
    for name, array in arrays.items():
        ours = KINDS[kind](name, settings)
        if ours is None:
            left.append(name)
        elif ours:
            named[ours] = array
    return named, left
