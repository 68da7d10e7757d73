"""A new head of each kind, with the layers it reads and the vocabulary it drafts chosen as is customary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError, suggest
from paceline.training.blocks import DFlash, DSpark
from paceline.training.head import Head
from paceline.training.layers import Shape
from paceline.training.rows import Eagle, Eagle3, Mtp
from paceline.training.teacher import Teacher
from paceline.training.transcripts import Transcript

KINDS: dict[str, Callable[..., Head]] = {
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": Mtp,
    "dflash": DFlash,
    "dspark": DSpark,
}

_LEAST_DEPTH = 8
_MOST_TAPS = 5


def taps_of(kind: str, depth: int) -> tuple[int, ...]:
    """Layers whose inputs a head of this kind reads, of a target of this depth.

    EAGLE-3's are those of its authors' code, those of block drafters spread as in z-lab's checkpoints; the
    others read what the target's final norm is given.

    Raises:
        UsageError: there is no such kind, or the target has too few layers for it.
    """
    if kind not in KINDS:
        raise UsageError(f"a head of kind {kind!r}", suggest(kind, list(KINDS)))
    if kind in ("eagle", "mtp"):
        return (depth,)
    if depth < _LEAST_DEPTH:
        raise UsageError(
            f"{kind} reads several layers; this target has {depth}", "fit eagle or mtp, which read one"
        )
    if kind == "eagle3":
        return (2, depth // 2, depth - 3)
    count = min(_MOST_TAPS, depth // 2 - 1)
    return tuple(1 + round(float(output)) for output in np.linspace(1, depth - 3, count))


def new_head(
    kind: str,
    teacher: Teacher,
    transcripts: Sequence[Transcript],
    *,
    taps: tuple[int, ...] | None = None,
    shape: Shape | None = None,
    draft_vocab: int | None = None,
    seed: int = 0,
    **sizes: Any,
) -> Head:
    """Make a head with random weights.

    Args:
        transcripts: texts of the target: EAGLE-3 drafts what is frequent in them, block drafters take an id
            for their mask that is not in them.
        taps: layers whose inputs it reads; None means `taps_of`.
        shape: of its layers; None means as the target's.
        draft_vocab: of EAGLE-3: how many ids it drafts; None means all that occur.
        sizes: more arguments of the kind's class.

    Raises:
        UsageError: no id is free for a mask.
    """
    torch.manual_seed(seed)
    taps, shape = taps or taps_of(kind, teacher.depth), shape or Shape.of(teacher.config)
    counts = _counts(transcripts, teacher.vocab_size)
    if kind in ("eagle", "mtp"):
        return KINDS[kind](teacher, shape, **sizes)
    if kind == "eagle3":
        return Eagle3(teacher, shape, taps, _frequent(counts, draft_vocab), **sizes)
    mask = sizes.pop("mask", None)
    mask = _unused(counts) if mask is None else mask
    return KINDS[kind](teacher, shape, taps, mask=mask, **sizes)


def _counts(transcripts: Sequence[Transcript], vocab: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[vocab] how often each id occurs."""
    counts = np.zeros(vocab, np.int64)
    for text in transcripts:
        counts += np.bincount(text.tokens, minlength=vocab)
    return counts


def _frequent(counts: np.ndarray[Any, np.dtype[np.int64]], most: int | None) -> list[int]:
    """The most frequent ids, ascending."""
    order = np.argsort(-counts, kind="stable")[:most]
    return sorted(int(i) for i in order if counts[i])


def _unused(counts: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    free = np.flatnonzero(counts == 0)
    if not len(free):
        raise UsageError("every id of the vocabulary occurs in the texts", "name one as mask=ID")
    return int(free[-1])
