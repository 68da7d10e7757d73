"""Whether a checkpoint can draft for a target at all, told from headers before anything is loaded.

What is checked here makes nothing wrong if it is overlooked: the target checks every token. But a head that
was made for another model drafts nothing of use, and takes memory and time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.checkpoint_ids import layer_ids, mask_token, parallel_length, target_ids
from paceline.drafters.dflash_config import BlockConfig, read_config
from paceline.errors import UnsupportedModelError
from paceline.models.config import DecoderConfig
from paceline.weights.source import Source

if TYPE_CHECKING:
    from paceline.drafters.head_program import Lender

_ANOTHER = "it was made for another model"

_REFUSED = {
    r"\.(ffn_gate_inp|ffn_\w+_exps|mlp\.(gate|experts|shared_expert))": "a mixture of experts",
    r"\.(self_attn\.(q_a|kv_a|kv_b)_|attn_(q_a|kv_a|kv_b))": "latent attention",
    r"\.(hc_|e_proj|h_proj)": "several streams",
    r"\.(self_attn\.g_proj|attn_gate)": "gated attention",
}
"""By the names of tensors: what a layer of an MTP head may be and does not run here."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be known of a target."""

    width: int
    layers: int
    vocab: int

    @classmethod
    def of(cls, lender: Lender) -> Facts:
        return cls(lender.lent.config.width, lender.lent.config.layers, lender.vocab_size)

    @classmethod
    def told_by(cls, file: Source) -> Facts:
        """The same from a model's header.

        Raises:
            ModelFileError, UnsupportedModelError: the model does not run here.
        """
        config = DecoderConfig.from_metadata(file.metadata)
        table = file.tensors.get("token_embd.weight")
        return cls(config.width, config.layers, 0 if table is None else table.shape[0])


def refuse_stranger(found: Checkpoint, target: Facts, taps: tuple[int, ...] | None = None) -> None:
    """Refuse a checkpoint that was made for another target, or that this engine cannot run.

    Args:
        taps: whose inputs it reads, in place of what it says itself.

    Raises:
        ModelFileError, UnsupportedModelError: it is refused, with the reason.
    """
    match found.kind:
        case "eagle":
            _check_shape(found, "fc.weight", target)
        case "eagle3":
            _check_eagle3(found, target, taps or layer_ids(found, target.layers))
        case "peagle":
            _check_eagle3(found, target, taps or layer_ids(found, target.layers))
            _check_masks(found, target)
        case "mtp":
            _refuse_layers(found)
            _check_shape(found, "blk.0.nextn.eh_proj.weight", target)
        case _:
            config = read_config(found, layers=target.layers, sample_from_anchor=True)
            check_block(found, config, target, taps or config.taps)


def check_block(found: Checkpoint, config: BlockConfig, target: Facts, taps: tuple[int, ...]) -> None:
    """Refuse a block drafter whose weights or tokens are not this target's."""
    width, states = config.decoder.width, len(taps) * target.width
    shared = [name for name in ("token_embd.weight", "output.weight") if not found.has(name)]
    fused = found.shape("fc.weight")
    if fused != (width, states) or (shared and width != target.width):
        raise found.fault(
            f"its fc.weight is {fused} and its width {width}; {len(taps)} layers of the target "
            f"are {states} wide",
            _ANOTHER,
        )
    if config.vocab != target.vocab:
        raise found.fault(f"it knows {config.vocab} tokens, the target {target.vocab}", _ANOTHER)
    if config.mask >= target.vocab:
        raise found.fault(f"its mask_token_id is {config.mask}, of {target.vocab} tokens", _ANOTHER)
    if found.has("output.weight") and found.shape("output.weight")[0] != target.vocab:
        target_ids(found, found.shape("output.weight")[0], target.vocab)


def _refuse_layers(found: Checkpoint) -> None:
    """Refuse MTP heads whose layers are of kinds that do not run here, by name."""
    for pattern, what in _REFUSED.items():
        if name := next((name for name in found.tensors if re.search(pattern, name)), None):
            raise UnsupportedModelError(
                f"{found.path}: its head has {what} ({name})", "MTP heads run here where their layer is dense"
            )
    for layer in range(found.layer_count()):
        queries, inner = (
            found.shape(f"blk.{layer}.attn_q.weight")[0],
            found.shape(f"blk.{layer}.attn_output.weight")[1],
        )
        if queries != inner:
            raise UnsupportedModelError(
                f"{found.path}: its attention is gated ({queries} rows of queries for {inner} that leave it)",
                "such heads do not run here yet",
            )


def _check_eagle3(found: Checkpoint, target: Facts, taps: tuple[int, ...]) -> None:
    fused = found.shape("fc.weight")
    if len(fused) != 2 or fused[1] != len(taps) * target.width:
        raise found.fault(
            f"fc is {fused}, for {len(taps)} layers of a target {target.width} wide it must be "
            f"{(fused[0], len(taps) * target.width)}",
            "it was made for another model, or reads other layers than it says",
        )
    if not found.has("token_embd.weight") and fused[0] != target.width:
        raise found.fault(
            f"it has no embedding of its own and is {fused[0]} wide, the target {target.width}", _ANOTHER
        )
    if found.has("output.weight"):
        target_ids(found, found.shape("output.weight")[0], target.vocab)


def _check_masks(found: Checkpoint, target: Facts) -> None:
    mask_token(found, target.vocab)
    parallel_length(found)
    states = found.shape("fc.weight")[1]
    if int(np.prod(found.shape("mask_hidden"))) != states:
        raise found.fault(f"mask_hidden is {found.shape('mask_hidden')}, fc reads {states}", _ANOTHER)
    if not np.isfinite(found.values("mask_hidden")).all():
        raise found.fault("mask_hidden: infinite or not a number", "the file is damaged; download it again")


def _check_shape(found: Checkpoint, name: str, target: Facts) -> None:
    """Refuse a matrix that does not read two states, and write one, of the target's width."""
    shape, width = found.shape(name), target.width
    if shape[0] != width and shape == (shape[0], 2 * shape[0]):
        raise found.fault(f"it is {shape[0]} wide, the target {width}", _ANOTHER)
    if shape != (width, 2 * width):
        raise found.fault(
            f"{name.removesuffix('.weight')} is {shape}, expected {(width, 2 * width)}", _ANOTHER
        )
