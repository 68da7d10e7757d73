"""What two tokenizers have in common: which ids mean the same, and which of the other's ids to use instead.

An id means the bytes that it spells, or, for a control token, its name; byte fallbacks and halves of
characters are compared as bytes, never as decoded text. Ids that spell nothing (embedding rows added to
round a matrix up) are padding, and no difference.

Source of the intersection: token-level intersection of Timor et al. (arXiv 2502.05202).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np

from paceline.core import Ids
from paceline.errors import UsageError
from paceline.text.tokenizer import Tokenizer

Mode = Literal["same", "intersection", "text"]
"""same: equal ids, those that differ masked. intersection: ids translated by their bytes, those that only
the draft has masked. text: the draft's text encoded anew."""

SAME = 0.98
"""Share of the smaller vocabulary that must agree, id by id, for the ids to be used as they are."""

COVERED = 0.97
"""Share of the target's tokens in everyday text that the draft must have for its ids to be used: each one
that it lacks ends a draft, and text can be encoded anew for little."""

EXAMPLES = 10

_SAMPLE = """The committee met on Tuesday afternoon to discuss the proposal, and although several members \
had serious reservations about the estimated costs, nobody questioned the underlying assumptions.

def moving_average(values, width):
    # Returns a list of floats.
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]

{"name": "temperature", "type": "number", "description": "between 0.0 and 2.0", "required": false}

1. Preheat the oven to 220 degrees.  2. Whisk three eggs with sugar.  Photosynthesis converts light into \
chemical energy: 6CO2 + 6H2O -> C6H12O6 + 6O2. "I don't know," she whispered, "whether it's true."
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """An id that two vocabularies use differently; a text is None where the id means nothing."""

    token: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two vocabularies, id by id.

    Attributes:
        target_size, draft_size: ids of each, padding included.
        equal: ids that mean the same in both.
        differing: ids that mean something in both, but not the same.
        target_only, draft_only: ids that mean something in one and nothing in the other.
        target_padding, draft_padding: ids that mean nothing.
        specials: those of the above that steer one of the models.
        examples: the first EXAMPLES of the differing ids and then of the others.
        coverage: share of the target's tokens in a sample of everyday text that the draft also has, under
            whatever id.
        shared: the draft's ids whose meaning the target has under some id.
        mode: how to draft with this pair.
    """

    target_size: int
    draft_size: int
    equal: int
    differing: tuple[int, ...]
    target_only: tuple[int, ...]
    draft_only: tuple[int, ...]
    target_padding: int
    draft_padding: int
    specials: tuple[int, ...]
    examples: tuple[Difference, ...]
    coverage: float
    shared: int
    mode: Mode

    @property
    def masked(self) -> int:
        """Draft ids that are never proposed."""
        if self.mode == "text":
            return 0
        return self.draft_size - (self.equal if self.mode == "same" else self.shared)

    def refuse_unless_same(self) -> None:
        """Raise UsageError, with the first differing ids, if too many differ for masking to make sense."""
        real = min(self.target_size - self.target_padding, self.draft_size - self.draft_padding)
        if self.equal < SAME * real:
            shown = "; ".join(f"{d.token}: {d.target!r} and {d.draft!r}" for d in self.examples[:3])
            raise UsageError(
                f"{len(self.differing)} of {real} token ids differ between target and draft model ({shown})",
                "leave out vocabulary=same, and the ids are translated",
            )

    def remedy(self) -> str:
        """What to know or to do, in a sentence."""
        if self.mode == "same":
            if not (self.differing or self.target_only or self.draft_only):
                return "The vocabularies are the same: nothing to do."
            return (
                f"{len(self.differing) + len(self.draft_only)} ids are masked in the draft and "
                f"{len(self.target_only)} of the target's are never drafted; nothing else to do."
            )
        if self.mode == "intersection":
            return (
                f"Ids are translated by their bytes, {self.masked} draft ids are masked; a draft model with "
                "the target's own tokenizer would be accepted more often."
            )
        return (
            "The draft's text is encoded anew for the target; a draft model with the target's own tokenizer "
            "would be faster and accepted more often."
        )


@dataclass(frozen=True, slots=True)
class Pairing:
    """How ids of a target and of a draft model translate.

    Attributes:
        to_target: [draft vocab] the target's id of the same meaning, -1 where there is none.
        to_draft: [target vocab] the draft's id of the same meaning, -1 where there is none.
    """

    mode: Mode
    comparison: Comparison
    to_target: Ids
    to_draft: Ids


def pair(
    target: Tokenizer, draft: Tokenizer, target_vocab: int, draft_vocab: int, mode: Mode | None = None
) -> Pairing:
    """Compare two tokenizers, and say how to draft for one with the other.

    Args:
        target_vocab, draft_vocab: rows of each model's logits; may be more than the tokenizer has.
        mode: None chooses.
    """
    theirs, ours = target.meanings(target_vocab), draft.meanings(draft_vocab)
    by_bytes = _by_meaning(target, draft, theirs, ours)
    equal = [a is not None and a == b for a, b in zip(theirs, ours, strict=False)]
    comparison = _compare(target, draft, theirs, ours, by_bytes, mode)
    if comparison.mode == "same":
        kept = np.flatnonzero(equal).astype(np.int32)
        to_target = np.full(draft_vocab, -1, np.int32)
        to_target[kept] = kept
    else:
        to_target = by_bytes
    return Pairing(comparison.mode, comparison, to_target, _inverse(to_target, target_vocab))


def _compare(
    target: Tokenizer,
    draft: Tokenizer,
    theirs: Sequence[bytes | None],
    ours: Sequence[bytes | None],
    by_bytes: Ids,
    mode: Mode | None,
) -> Comparison:
    both = list(zip_longest(theirs, ours))
    differing = [i for i, (a, b) in enumerate(both) if a != b and a is not None and b is not None]
    target_only = [i for i, (a, b) in enumerate(both) if a is not None and b is None]
    draft_only = [i for i, (a, b) in enumerate(both) if a is None and b is not None]
    odd = [*differing, *target_only, *draft_only]
    equal = len(theirs) - theirs.count(None) - len(differing) - len(target_only)
    control = target.special_ids | draft.special_ids
    coverage = _coverage(target, by_bytes)
    real = min(len(theirs) - theirs.count(None), len(ours) - ours.count(None))
    if coverage < COVERED:
        mode = mode or "text"
    elif equal < SAME * real:
        mode = mode or "intersection"
    return Comparison(
        target_size=len(theirs),
        draft_size=len(ours),
        equal=equal,
        differing=tuple(differing),
        target_only=tuple(target_only),
        draft_only=tuple(draft_only),
        target_padding=theirs.count(None),
        draft_padding=ours.count(None),
        specials=tuple(i for i in odd if i in control),
        examples=tuple(Difference(i, *map(_text, both[i])) for i in odd[:EXAMPLES]),
        coverage=coverage,
        shared=int(np.count_nonzero(by_bytes >= 0)),
        mode=mode or "same",
    )


def _by_meaning(
    target: Tokenizer, draft: Tokenizer, theirs: Sequence[bytes | None], ours: Sequence[bytes | None]
) -> Ids:
    """[draft vocab] the target's id with the same bytes, and for control tokens the same name or role."""
    plain: dict[bytes, int] = {}
    control: dict[bytes, int] = {}
    special = target.special_ids
    for token, spelled in enumerate(theirs):
        if spelled:
            # What one byte spells, a byte fallback may spell too; the later id is the one in use.
            known = control if token in special else plain
            if spelled not in known or target.is_byte(known[spelled]):
                known[spelled] = token
    to_target = np.full(len(ours), -1, np.int32)
    special = draft.special_ids
    for token, spelled in enumerate(ours):
        if spelled:
            to_target[token] = (control if token in special else plain).get(spelled, -1)
    for mine, its in ((draft.bos_id, target.bos_id), (draft.eos_id, target.eos_id)):
        if mine is None or its is None or mine >= len(ours) or its >= len(theirs):
            continue
        if to_target[mine] < 0:
            to_target[mine] = its
    return to_target


def _inverse(to_target: Ids, target_vocab: int) -> Ids:
    """[target vocab] the highest of the draft's ids that translate to it: pieces come after fallbacks."""
    to_draft = np.full(target_vocab, -1, np.int32)
    known = np.flatnonzero(to_target >= 0)
    to_draft[to_target[known]] = known
    return to_draft


def _coverage(target: Tokenizer, to_target: Ids) -> float:
    ids = target.encode(_SAMPLE, add_special=False)
    shared = set(to_target[to_target >= 0].tolist())
    return sum(token in shared for token in ids) / len(ids)


def _text(spelled: bytes | None) -> str | None:
    return None if spelled is None else spelled.decode("utf-8", "backslashreplace")
