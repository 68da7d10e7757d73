"""A head that drafts only the commonest tokens, because of what its output matrix costs.

Beside a small model with a large vocabulary the output matrix is most of what a head costs. Few tokens make
up nearly all text, so a head that leaves the others to the target is right a little less often and much
cheaper (FR-Spec, arXiv 2502.14856). Byte-pair tokenizers number tokens in the order of their merges, the
commonest first; so the lowest ids are taken, and those that end a text.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.checkpoint_arrays import Array
from paceline.drafters.head_program import Lender
from paceline.errors import UsageError

_MARKOV = "markov_head.markov_w2.weight"


def shorten(found: Checkpoint, lender: Lender, count: int, keep: Iterable[int]) -> None:
    """Leave of a checkpoint's output, or of the target's where it has none, the rows of `count` ids.

    Args:
        keep: ids that are left besides the lowest.

    Raises:
        UsageError: it has a reduced vocabulary already, or there are not so many ids.
    """
    if found.has("d2t"):
        raise UsageError(
            f"{found.path} drafts from a reduced vocabulary already", "leave out draft_vocab_size"
        )
    if not 1 <= count <= lender.vocab_size:
        raise UsageError(
            f"draft_vocab_size is {count}, the target has {lender.vocab_size} tokens",
            "give fewer, or leave it out",
        )
    ids = np.array(sorted({*range(count), *keep}), np.int64)
    if len(ids) == lender.vocab_size:
        return
    for name in _outputs(found):
        found.keep_rows(name, ids, None if found.has(name) else _lent(lender))
    if found.has(_MARKOV):
        found.keep_rows(_MARKOV, ids)
    found.map_ids(ids)


def _outputs(found: Checkpoint) -> list[str]:
    """Names of the matrices that make logits."""
    if found.kind != "mtp":
        return ["output.weight"]
    heads = 1 if found.layout == "Qwen" else found.layer_count()  # there they share all but their layers
    return [f"blk.{number}.nextn.shared_head_head.weight" for number in range(heads)]


def _lent(lender: Lender) -> Array:
    """The target's output matrix."""
    file = lender.lent.file
    name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    return Array(file.tensors[name].type, file.tensors[name].shape, lambda: file.data(name))
