"""Heads that draft only the commonest tokens: of the ids that are left they say what they said before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters import registry
from paceline.errors import UsageError
from support import block_heads, tiny_heads, tiny_mtp
from support.head_targets import MODEL, ON, drafter_for, heard, host_for, target_for, tokens_of
from support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

COUNT = 60
KEPT = sorted({*range(COUNT), *tiny_tokenizer().eog_ids})
BLOCKS: dict[str, Any] = {"vocab": VOCAB_SIZE, "target_layers": 8, "mask": 250}
HEADS: dict[str, Any] = {
    "eagle": tiny_heads.TinyHead(kind="eagle", taps=(8,), draft_vocab=0, vocab=VOCAB_SIZE),
    "eagle3": tiny_heads.TinyHead(draft_vocab=0, vocab=VOCAB_SIZE),
    "mtp": tiny_mtp.TinyMtp(vocab=VOCAB_SIZE, layout="DeepSeek", own_head=True),
    "two MTP heads": tiny_mtp.TinyMtp(vocab=VOCAB_SIZE, layout="MiMo", heads_in_file=2),
    "three MTP layers": tiny_mtp.TinyMtp(vocab=VOCAB_SIZE, heads_in_file=3),
    "dflash": block_heads.TinyHead(**BLOCKS),
    "dspark": block_heads.TinyHead(**BLOCKS, layout="deepspec", markov="vanilla", own=True),
}


def said(drafter: Any, target: Any) -> tuple[Any, list[int]]:
    """What the first token of a draft is chosen by, and the tokens of the draft."""
    seen: list[Any] = []
    pick = drafter._choices.pick

    def watch(values: Any, *more: Any) -> Any:
        seen.append(values.copy())
        return pick(values, *more)

    drafter._choices.pick = watch
    draft = drafter.propose(heard(drafter, target, tokens_of(1, 20), params=ON), 4)
    return seen[0], draft.tokens


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_logits_are_the_same(name: str, tied: bool, tmp_path: Path) -> None:
    target = target_for(tmp_path, replace(MODEL, tied=tied))
    path = HEADS[name].write(tmp_path / "head")
    whole, _ = said(drafter_for(target, path), target)
    short, tokens = said(drafter_for(target, path, draft_vocab_size=COUNT), target)
    assert np.array_equal(short, whole[KEPT])
    assert tokens[0] == KEPT[int(short.argmax())]
    assert set(tokens) <= set(KEPT)


def test_all_ids_are_no_shortlist(tmp_path: Path) -> None:
    target = target_for(tmp_path)
    drafter: Any = drafter_for(target, HEADS["eagle"].write(tmp_path / "head"), draft_vocab_size=VOCAB_SIZE)
    assert drafter.head.vocab_size == VOCAB_SIZE
    assert not drafter.head.checkpoint.has("output.weight")


def test_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    target = target_for(tmp_path)
    reduced = tiny_heads.TinyHead(vocab=VOCAB_SIZE, draft_vocab=90).write(tmp_path / "reduced")
    with pytest.raises(UsageError, match="drafts from a reduced vocabulary already"):
        drafter_for(target, reduced, draft_vocab_size=COUNT)
    path = HEADS["mtp"].write(tmp_path / "head")
    for count in (0, VOCAB_SIZE + 1):
        with pytest.raises(UsageError, match=f"draft_vocab_size is {count}, the target has {VOCAB_SIZE}"):
            drafter_for(target, path, draft_vocab_size=count)


def test_it_is_an_option_of_every_head(tmp_path: Path) -> None:
    host = host_for(target_for(tmp_path))
    path = HEADS["dflash"].write(tmp_path / "head")
    spec = f"dflash:{path},draft_vocab_size={COUNT}"
    (drafter,) = registry.configure(spec, vocab_size=VOCAB_SIZE, host=host).drafters
    assert drafter.model.places.tolist() == KEPT  # type: ignore[attr-defined]
