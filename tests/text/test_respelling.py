"""One text in two tokenizers, growing token by token."""

from __future__ import annotations

import random

import pytest

from paceline.text.pairing import Mode, pair
from paceline.text.respelling import (
    LOOK_BEHIND,
    TextSpelling,
    TokenSpelling,
    Translator,
    retell,
    whole_characters,
)
from paceline.text.tokenizer import Tokenizer
from support.vocabularies import CONTROL, byte_level, sentencepiece

END = {"<end>": CONTROL}
WORDS = Tokenizer.from_gguf(
    byte_level(["t h", "th e", "Ġ the", "Ġ a", "i n", "in g"], extra=END, eos_token_id=262)
)
OTHERS = Tokenizer.from_gguf(
    byte_level(["h e", "Ġ t", "Ġt he", "n g", "Ġ i", "Ġi n"], extra=END, eos_token_id=262)
)
PIECES = Tokenizer.from_gguf(sentencepiece({"▁the": -1.0, "▁": -4.0, "ing": -2.0, "th": -3.0, "t": -9.0}))
TEXT = " the thing in theory, a naïve 😀 ending\n\nin the  end"


def translator(target: Tokenizer, draft: Tokenizer, mode: Mode = "text") -> Translator:
    sizes = target.vocab_size, draft.vocab_size
    return Translator(target, draft, pair(target, draft, *sizes, mode))


def spelled(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


PAIRS = [(WORDS, OTHERS), (OTHERS, WORDS), (WORDS, PIECES), (PIECES, OTHERS), (WORDS, WORDS)]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_token_by_token_the_bytes_are_the_same(target: Tokenizer, draft: Tokenizer) -> None:
    spelling = TokenSpelling(translator(target, draft, "intersection"))
    tokens = target.encode(TEXT, add_special=False, continuing=True)
    before: list[int] = []
    for token in tokens:
        spelling.follow([token])
        assert spelling.ids[: len(before)] == before  # nothing is spelled anew
        before = list(spelling.ids)
    start = len(spelling._translator.opening())
    assert spelled(draft, spelling.ids[start:]) == spelled(target, tokens)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_text_is_spelled_as_the_draft_would(target: Tokenizer, draft: Tokenizer) -> None:
    spelling = TextSpelling(translator(target, draft))
    start = len(spelling.ids)
    tokens = target.encode(TEXT, add_special=False, continuing=True)
    spelling.follow(tokens)
    assert spelled(draft, spelling.ids[start:]) == spelled(target, tokens)
    assert spelling.ids[start:] == draft.encode(TEXT, add_special=False, continuing=True)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("seed", range(20))
def test_text_in_any_portions_keeps_its_bytes_and_its_past(
    target: Tokenizer, draft: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    spelling = TextSpelling(translator(target, draft))
    start = len(spelling.ids)
    whole = TEXT * 3
    tokens = target.encode(whole, add_special=False, continuing=True)
    at = 0
    while at < len(tokens):
        fixed = spelling.ids[: len(spelling.ids) - spelling.loose]
        step = rng.randint(1, 6)
        spelling.follow(tokens[at : at + step])
        at += step
        assert spelling.ids[: len(fixed)] == fixed
        assert 0 <= spelling.loose <= LOOK_BEHIND
        done = spelled(draft, spelling.ids[start:]) + spelling._half
        assert done == spelled(target, tokens[:at])
    assert len(spelling.ids) - start <= 1.1 * len(draft.encode(whole, add_special=False, continuing=True)) + 2


def test_control_tokens_keep_their_role_and_part_the_text() -> None:
    spelling = TextSpelling(translator(WORDS, OTHERS))
    spelling.follow([*WORDS.encode(" the", add_special=False), 262, *WORDS.encode(" the", add_special=False)])
    the = OTHERS.encode(" the", add_special=False)
    assert spelling.ids == [*the, 262, *the]
    other = Translator(WORDS, PIECES, pair(WORDS, PIECES, 263, PIECES.vocab_size, "text"))
    assert other.spell(262) == [PIECES.eos_id]


def test_a_draft_that_begins_with_bos_gets_one_and_no_more() -> None:
    """User problem C19."""
    spelling = TextSpelling(translator(WORDS, PIECES))
    for token in WORDS.encode(TEXT, add_special=False):
        spelling.follow([token])
    assert spelling.ids[0] == PIECES.bos_id
    assert spelling.ids.count(PIECES.bos_id) == 1  # type: ignore[arg-type]


def test_no_id_is_used_that_the_draft_model_has_no_row_for() -> None:
    small = Translator(WORDS, PIECES, pair(WORDS, PIECES, 263, 1, "text"))
    assert small.opening() == []
    spelling = TextSpelling(small)
    spelling.follow(WORDS.encode(TEXT, add_special=False))
    assert set(spelling.ids) <= {0}


def test_ids_beyond_the_tokenizer_spell_nothing() -> None:
    assert translator(WORDS, OTHERS).spell(9999) == []
    spelling = TextSpelling(translator(WORDS, OTHERS))
    spelling.follow([9999])
    assert spelling.ids == []


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_retold_drafts_spell_the_same(target: Tokenizer, draft: Tokenizer) -> None:
    pairing = translator(target, draft)
    ids = draft.encode(TEXT, add_special=False, continuing=True)
    for cut in range(1, len(ids) + 1):
        told = retell(pairing, [], ids[:cut])
        data = spelled(draft, ids[:cut])
        assert spelled(target, [token for token, _ in told]) == data[: whole_characters(data)]
        counts = [n for _, n in told]
        assert counts == sorted(counts)
        assert not counts or counts[-1] <= cut


def test_retold_tokens_say_how_much_of_the_draft_they_needed() -> None:
    pairing = translator(WORDS, OTHERS)
    drafted = OTHERS.encode(" thing", add_special=False)  # Ġt h i ng
    assert [OTHERS.token_bytes(i) for i in drafted] == [b" t", b"h", b"i", b"ng"]
    told = retell(pairing, [], drafted)
    assert [(WORDS.token_bytes(t), n) for t, n in told] == [(b" ", 1), (b"th", 2), (b"ing", 4)]


def test_a_draft_goes_on_from_inside_a_word() -> None:
    """ " th" is committed; "e" alone would be the byte, and is what the target writes there."""
    pairing = translator(WORDS, OTHERS)
    before = WORDS.encode(" in", add_special=False)
    drafted = OTHERS.encode("g the", add_special=False)
    told = [t for t, _ in retell(pairing, before, drafted)]
    assert spelled(WORDS, told) == b"g the"


def test_retelling_stops_at_what_has_no_telling() -> None:
    pairing = translator(WORDS, OTHERS)
    emoji = OTHERS.encode("😀", add_special=False)
    assert retell(pairing, [], emoji[:2]) == []
    assert retell(pairing, [], [262]) == [(262, 1)]
    assert [t for t, _ in retell(pairing, [], [ord("a") - 33 + 1 * 0, 262])][-1] == 262
    strange = Translator(WORDS, PIECES, pair(WORDS, PIECES, 263, PIECES.vocab_size, "text"))
    assert retell(strange, [], [0]) == []  # <unk>


@pytest.mark.parametrize(
    ("data", "whole"),
    [(b"", 0), (b"ab", 2), ("é".encode(), 2), ("é".encode()[:1], 0), (b"a" + "😀".encode()[:3], 1),
     ("😀".encode(), 4), (b"\x80\x80\x80\x80\x80", 5), (b"a\xff", 1)],
)  # fmt: skip
def test_unfinished_characters_wait(data: bytes, whole: int) -> None:
    assert whole_characters(data) == whole
