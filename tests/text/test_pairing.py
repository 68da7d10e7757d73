"""Two vocabularies, id by id: exact counts, and who is used for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.text.pairing import Difference, pair
from paceline.text.tokenizer import Tokenizer
from support.vocabularies import CONTROL, NORMAL, UNUSED, byte_level, sentencepiece

MERGES = ["a b", "c d", "e f", "g h"]


def tokenizer(extra: dict[str, int] | None = None, merges: list[str] = MERGES, **more: Any) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level(merges, extra=extra or {}, **more))


PLAIN = tokenizer({"<end>": CONTROL}, eos_token_id=260)
SIZE = 261


def test_equal_vocabularies_need_nothing() -> None:
    found = pair(PLAIN, tokenizer({"<end>": CONTROL}, eos_token_id=260), SIZE, SIZE)
    c = found.comparison
    assert (found.mode, c.equal, c.differing, c.target_only, c.draft_only, c.masked) == (
        "same",
        261,
        (),
        (),
        (),
        0,
    )
    assert (c.coverage, c.shared, c.specials, c.examples) == (1.0, 261, (), ())
    assert found.to_target.tolist() == found.to_draft.tolist() == list(range(261))
    assert c.remedy() == "The vocabularies are the same: nothing to do."


def test_padding_is_no_difference() -> None:
    padded = tokenizer({"<end>": CONTROL, "[PAD261]": UNUSED, "[PAD262]": UNUSED})
    for target, draft, sizes in ((PLAIN, padded, (261, 389)), (padded, PLAIN, (389, 261))):
        found = pair(target, draft, *sizes)
        c = found.comparison
        assert (found.mode, c.equal, c.differing, c.target_only, c.draft_only) == ("same", 261, (), (), ())
        assert {c.target_padding, c.draft_padding} == {0, 128}
        assert len(found.to_target) == sizes[1]
        assert len(found.to_draft) == sizes[0]
        assert found.to_target[:261].tolist() == list(range(261))
        assert (found.to_target[261:] == -1).all()


def test_tokens_that_the_target_has_besides_are_never_drafted() -> None:
    target = tokenizer({"<end>": CONTROL, "<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL})
    found = pair(target, PLAIN, 264, 261)
    c = found.comparison
    assert (found.mode, c.target_only, c.specials) == ("same", (261, 262, 263), (261, 262, 263))
    assert c.examples == tuple(Difference(261 + i, f"<{'abc'[i]}>", None) for i in range(3))
    assert found.to_draft[261:].tolist() == [-1, -1, -1]
    assert "3 of the target's are never drafted" in c.remedy()


def test_a_single_differing_id_is_listed_and_masked() -> None:
    other = tokenizer({"<end>": CONTROL}, ["a b", "c d", "x y", "g h"])
    found = pair(PLAIN, other, SIZE, SIZE)
    c = found.comparison
    assert (found.mode, c.equal, c.differing, c.masked) == ("same", 260, (258,), 1)
    assert c.examples == (Difference(258, "ef", "xy"),)
    assert found.to_target[258] == found.to_draft[258] == -1
    assert "1 ids are masked" in c.remedy()


def shuffled() -> tuple[Tokenizer, list[int]]:
    order = np.random.default_rng(1).permutation(261).tolist()
    plain = byte_level(MERGES, extra={"<end>": CONTROL}, eos_token_id=order.index(260))
    for key in ("tokens", "token_type"):
        plain["tokenizer.ggml." + key] = [plain["tokenizer.ggml." + key][i] for i in order]
    return Tokenizer.from_gguf(plain), order


def test_shuffled_ids_are_translated_or_refused_with_the_first_that_differ() -> None:
    draft, order = shuffled()
    found = pair(PLAIN, draft, SIZE, SIZE)
    assert found.mode == "intersection"
    assert found.to_target.tolist() == order
    assert found.comparison.coverage == 1.0
    strict = pair(PLAIN, draft, SIZE, SIZE, "same").comparison
    first = next(i for i in range(SIZE) if order[i] != i)
    with pytest.raises(UsageError, match=rf"token ids differ between target and draft model \({first}: "):
        strict.refuse_unless_same()


def test_a_poor_intersection_leads_to_text() -> None:
    words = ["t h", "th e", "i n", "e r", "o n", "r e"]
    found = pair(tokenizer(merges=words), tokenizer(merges=["q q", "z z"]), 262, 258)
    assert found.mode == "text"
    assert 0.5 < found.comparison.coverage < 0.97
    assert "encoded anew" in found.comparison.remedy()


def test_bytes_decide_and_not_decoded_text() -> None:
    """Halves of characters all decode to U+FFFD; byte fallbacks are bytes, and give way to whole pieces."""
    pieces = Tokenizer.from_gguf(sentencepiece({"A": -1.0, "▁the": -2.0, "é": -3.0}))
    found = pair(PLAIN, pieces, SIZE, 262, "intersection")
    fallback = {byte: 3 + byte for byte in range(256)}
    assert found.to_target[fallback[0xC3]] == PLAIN.encode("é", add_special=False)[0]
    assert found.to_target[fallback[0xFF]] >= 0
    assert len({int(found.to_target[fallback[byte]]) for byte in range(256)}) == 256
    assert found.to_target[259] == PLAIN.encode("A", add_special=False)[0]
    assert found.to_draft[PLAIN.encode("A", add_special=False)[0]] == 259  # the piece, not <0x41>
    assert found.to_target[260] == -1  # " the" is no token of the target
    back = pair(pieces, PLAIN, 262, SIZE, "intersection")
    assert back.to_target[PLAIN.encode("A", add_special=False)[0]] == 259


def test_control_tokens_match_by_name_or_role_and_never_plain_text() -> None:
    target = tokenizer({"<end>": CONTROL, "</s>": NORMAL}, eos_token_id=260)
    draft = tokenizer({"<stop>": CONTROL, "</s>": CONTROL, "<end>": NORMAL}, eos_token_id=260)
    found = pair(target, draft, 262, 263, "intersection")
    assert found.to_target[260] == 260  # both end the text
    assert found.to_target[261] == -1
    assert found.to_target[262] == -1


def test_no_id_outside_the_logits_is_ever_used() -> None:
    found = pair(PLAIN, PLAIN, 200, 100, "intersection")
    assert len(found.to_target) == 100
    assert len(found.to_draft) == 200
    assert found.to_target.max() < 200
    assert found.to_draft.max() < 100
