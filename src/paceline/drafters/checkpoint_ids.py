"""Which of its target's tokens and layers a drafter means by its own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import is_whole
from paceline.drafters.checkpoint import Checkpoint

_ANOTHER = "it was made for another model"


def target_ids(found: Checkpoint, rows: int, vocab: int) -> NDArray[np.int64] | None:
    """[rows] the target's id of each id that a head drafts; None where they are the same.

    Args:
        rows: of the head's output matrix.
        vocab: of the target.

    Raises:
        ModelFileError: there is no map where one is needed, or it makes no sense.
    """
    if not found.has("d2t"):
        if rows != vocab:
            raise found.fault(
                f"its output has {rows} ids, the target {vocab}, and there is no d2t that maps them", _ANOTHER
            )
        return None
    raw = found.indices("d2t").reshape(-1)
    if len(raw) != rows:
        raise found.fault(f"d2t has {len(raw)} ids, the output {rows}", "the checkpoint is damaged")
    kept = found.indices("t2d").reshape(-1) if found.has("t2d") else np.ones(vocab, np.int64)
    if len(kept) != vocab:
        raise found.fault(f"t2d has {len(kept)} ids, the target {vocab}", _ANOTHER)
    offsets, absolute = raw + np.arange(rows), raw
    ids, other = (absolute, offsets) if found.layout == "GGUF" else (offsets, absolute)
    if _are_ids(ids, kept):
        return None if rows == vocab else ids
    if _are_ids(other, kept):
        customary, given = ("ids", "offsets") if found.layout == "GGUF" else ("offsets", "ids")
        raise found.fault(f"d2t holds {given} where {customary} are customary", "convert it again")
    if ids.max() >= vocab:
        raise found.fault(f"d2t leads to id {int(ids.max())}, the target has {vocab}", _ANOTHER)
    raise found.fault("d2t does not lead to ascending ids of the target", "the checkpoint is damaged")


def _are_ids(ids: NDArray[np.int64], kept: NDArray[np.int64]) -> bool:
    """Whether these ascend within the vocabulary and are those that `kept` marks."""
    inside = len(ids) > 0 and ids[0] >= 0 and ids[-1] < len(kept)
    return bool(inside and (np.diff(ids) > 0).all() and kept[ids].all())


def layer_ids(found: Checkpoint, layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads, in its order, by the conventions of its layout.

    Args:
        layers: of the target.

    Raises:
        ModelFileError: the checkpoint does not say, or names layers that the target does not have.
    """
    ids, shift = _declared(found, layers)
    if (
        not isinstance(ids, Sequence)
        or isinstance(ids, str)
        or not ids
        or any(type(i) is not int for i in ids)
    ):
        raise found.fault(f"the layers it reads are {str(ids)[:60]}", "they must be a list of whole numbers")
    taps = tuple(i + shift for i in ids)
    if list(taps) != sorted(set(taps)):
        raise found.fault(f"the layers it reads, {list(ids)}, do not ascend", "the checkpoint is damaged")
    if taps[0] < 0 or taps[-1] > layers:
        raise found.fault(f"it reads layers {list(ids)} of a target that has {layers}", _ANOTHER)
    return taps


def _declared(found: Checkpoint, layers: int) -> tuple[Any, int]:
    """(ids, what must be added so that they name inputs of layers)"""
    nested = found.settings.get("eagle_config")
    if isinstance(nested, Mapping) and nested.get("eagle_aux_hidden_state_layer_ids"):
        return nested["eagle_aux_hidden_state_layer_ids"], 1
    for name, shift in _ID_KEYS:
        if found.settings.get(name) is not None:
            return found.settings[name], shift
    if found.layout in ("SafeAILab", "SpecForge") and found.kind == "eagle3" and layers >= 6:
        return [2, layers // 2, layers - 3], 0  # fixed in their code, which writes no key
    raise found.fault(
        "it does not say which layers of the target it reads",
        "set eagle_aux_hidden_state_layer_ids in its config.json, or give layers=2-12-21",
    )


_ID_KEYS = (
    ("eagle_aux_hidden_state_layer_ids", 0),
    ("aux_hidden_state_layer_ids", 0),
    ("target_layers", 0),
    ("target_layer_ids", 1),
    ("dspark_target_layer_ids", 1),
)


_MOST_PARALLEL = 16
_PARALLEL = 8
"""Rows that guess where a checkpoint does not say: so many depths are trained by default."""


def mask_token(found: Checkpoint, vocab: int) -> int:
    """The token in rows that guess in parallel.

    Raises:
        ModelFileError: the checkpoint does not say, or says none of the target's.
    """
    nested = found.settings.get("dflash_config")
    inner = nested.get("mask_token_id") if isinstance(nested, Mapping) else None
    token = found.setting("mask_token_id", "pard_token", "ptd_token_id", default=inner)
    if token is None:
        raise found.fault("it does not say which token masks", "set mask_token_id in its config.json")
    if not is_whole(token) or not 0 <= token < vocab:
        raise found.fault(f"its mask_token_id is {str(token)[:40]}, of {vocab} tokens", _ANOTHER)
    return int(token)


def parallel_length(found: Checkpoint) -> int:
    """How many tokens a head guesses in one pass."""
    depths = found.setting("num_depths", "para_depths", default=_PARALLEL)
    if not is_whole(depths) or not 1 <= depths <= _MOST_PARALLEL:
        raise found.fault(
            f"it guesses {str(depths)[:40]} tokens in parallel", f"from 1 to {_MOST_PARALLEL} run here"
        )
    return int(depths)
