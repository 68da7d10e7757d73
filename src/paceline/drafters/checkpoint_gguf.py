"""Drafters in GGUF files, as llama.cpp's converters write them.

    eagle3    a head of its own, in a file of its own
    dflash    a block drafter; with `markov_w1` it is a DSpark one
    any model with `nextn_predict_layers`: the last blocks are MTP heads; such a file may hold nothing else

Layers that are read are counted by their inputs. Keys become settings under the names that the other layouts
have, where those are what asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.drafters.checkpoint_arrays import Array, Contents, Indices, from_gguf
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.weights.gguf import GGUFFile

_DAMAGED = "convert it again"

_BLOCK_NAMES = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}


def read_gguf(path: Path) -> Contents:
    """Find the drafter in a GGUF file.

    Raises:
        ModelFileError: the file is damaged, or keys of the drafter are.
        UnsupportedModelError: it asks for what does not run here, by name.
    """
    file = GGUFFile.open(path, indices=True)
    family = str(file.metadata.get("general.architecture", ""))
    settings = {
        key.removeprefix(family + "."): value
        for key, value in file.metadata.items()
        if key.startswith(family + ".")
    }
    arrays, indices, identity = from_gguf(file), file.indices(), file.identity()
    if family == "eagle3":
        return Contents("eagle3", "GGUF", settings, arrays, indices, identity, interleaved=True)
    if family == "dflash":
        return _block(path, settings, arrays, indices, file)
    if heads := settings.get("nextn_predict_layers"):
        blocks = _nextn(path, arrays, settings, heads)
        return Contents("mtp", "GGUF", settings, blocks, indices, identity, interleaved=family == "llama")
    return Contents("model", "GGUF", settings, arrays, indices, identity)


def _block(
    path: Path,
    settings: dict[str, Any],
    arrays: Mapping[str, Array],
    indices: Indices,
    file: GGUFFile,
) -> Contents:
    """A block drafter, with its keys and tensors named as DeepSpec's and z-lab's files have them."""
    _refuse_variants(path, settings, arrays)
    metadata = file.metadata
    named = {_BLOCK_NAMES.get(name, name): array for name, array in arrays.items()}
    table = named.get("markov_head.markov_w1.weight")
    if "confidence_head.proj.weight" in named and "confidence_head.proj.bias" not in named:
        named["confidence_head.proj.bias"] = Array.of(np.zeros(1, np.float32))
    sparks = table is not None or "confidence_head.proj.weight" in named
    meant = {
        "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        "vocab_size": settings.get("vocab_size", len(metadata.get("tokenizer.ggml.tokens") or ())) or None,
        "num_hidden_layers": settings.get("block_count"),
        "layer_types": _layer_types(path, settings),
        "sliding_window": settings.get("attention.sliding_window"),
        "is_causal": settings.get("attention.causal", False),
        "markov_rank": None if table is None else table.shape[-1],
    }
    settings = settings | {key: value for key, value in meant.items() if value is not None}
    kind = "dspark" if sparks or settings.get("sample_from_anchor") is True else "dflash"
    return Contents(kind, "GGUF", settings, named, indices, file.identity())


def _refuse_variants(path: Path, settings: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    sections = settings.get("rope.dimension_sections") or []
    found = {
        "DFlash2, which mixes neighbours by convolutions": "selector_hidden.weight" in arrays
        or bool(settings.get("conv_kernel_size")),
        "the module inside DeepSeek-V4": bool(settings.get("hyper_connection_count")),
        "attention sinks": any(name.endswith(".attn_sinks.weight") for name in arrays),
        "rope of several sections": any(sections[1:]) if isinstance(sections, list) else True,
        f"hidden_activation = {settings.get('hidden_activation')!r}": settings.get("hidden_activation")
        not in (None, "silu"),
    }
    for key in ("embedding_scale", "logit_scale"):
        found[f"{key} = {settings.get(key)}"] = settings.get(key) not in (None, 0.0, 1.0)
    for what, is_there in found.items():
        if is_there:
            raise UnsupportedModelError(f"{path}: {what}", "that does not run here yet")


def _layer_types(path: Path, settings: Mapping[str, Any]) -> list[str] | None:
    """Of each layer, whether it has a window; None where none has."""
    if not settings.get("attention.sliding_window"):
        return None
    pattern = settings.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or not all(isinstance(one, bool) for one in pattern):
        raise ModelFileError(f"{path}: a window, and no pattern of the layers that have it", _DAMAGED)
    return ["sliding_attention" if one else "full_attention" for one in pattern]


def _nextn(
    path: Path, arrays: Mapping[str, Array], settings: Mapping[str, Any], heads: object
) -> dict[str, Array]:
    """The blocks that are heads, numbered from 0."""
    blocks = settings.get("block_count")
    if type(heads) is not int or type(blocks) is not int or not 0 < heads < blocks:
        raise ModelFileError(f"{path}: {heads} of {blocks} blocks are heads", _DAMAGED)
    first, found = blocks - heads, {}
    for name, array in arrays.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is not None and int(match[1]) >= first:
            found[f"blk.{int(match[1]) - first}.{match[2]}"] = array
    return found
