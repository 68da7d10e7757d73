"""Byte-level tokenizers: ids worked out by hand, and ids that llama.cpp gave for a large corpus."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.decoders import ByteLevel

from paceline.errors import ModelFileError, PromptTooLongError, RequestError, UnsupportedModelError
from paceline.text.tokenizer import Tokenizer
from paceline.weights.gguf import GGUFFile
from support.text_corpus import corpus, digest
from support.vocabularies import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_characters,
    byte_level,
    sentencepiece,
)

RECORDED = json.loads(Path(__file__).with_name("recorded").joinpath("byte_level.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> dict[str, Any]:
    file = GGUFFile.open(smollm2_path)
    try:
        return dict(file.metadata)
    finally:
        file.close()


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("pre", RECORDED)
@pytest.mark.parametrize("part", ["text", "special"])
def test_ids_equal_the_reference_on_the_corpus(smollm2: dict[str, Any], pre: str, part: str) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2 | {"tokenizer.ggml.pre": pre})
    texts = corpus()
    got = [tokenizer.encode(text, add_special=False, parse_special=part == "special") for text in texts]
    recorded = RECORDED[pre][part]
    for index, expected in recorded["full"].items():
        assert got[int(index)] == expected, texts[int(index)]
    digests = recorded["digests"].split()
    assert [texts[i] for i, g in enumerate(got) if digest(g) != digests[i]] == []
    assert len(digests) == len(texts)


def test_decoding_gives_the_corpus_back(smollm2: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    for text in corpus():
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, parse_special=True), skip_special=False) == text


def test_smollm2_has_the_roles_its_file_names(smollm2: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (
        49152,
        1,
        2,
        False,
    )
    # llama.cpp prints the same three: <|endoftext|>, <|im_end|>, <reponame>.
    assert tokenizer.eog_ids == {0, 2, 4}
    assert [i for i in range(20) if tokenizer.is_special(i)] == list(range(17))


def test_merges_apply_in_rank_order() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(["b c", "a b", "ab c"]))
    # "b c" ranks first, so "abc" never becomes ab + c.
    assert tokenizer.encode("abc") == [97, 256]
    assert tokenizer.encode("ab") == [257]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "12345 'S's", ["12345", " '", "S", "'s"]),
        ("smollm", "12345 'S's", ["1", "2", "3", "4", "5", " '", "S", "'s"]),
        ("smollm", "a 1", ["a", " ", "1"]),
        ("qwen2", "12345 'S's", ["1", "2", "3", "4", "5", " '", "S", "'s"]),
        ("qwen2", "I'M x\r\n\r\n  y", ["I", "'M", " x", "\r\n\r\n", " ", " y"]),
        ("gpt-2", "I'M x\r\n\r\n  y", ["I", "'", "M", " x", "\r\n\r\n ", " y"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("llama-bpe", ".foo(bar)", [".foo", "(bar", ")"]),
        ("default", "12345=a", ["123", "45", "=", "a"]),
    ],
)
def test_each_pre_tokenizer_splits_as_named(pre: str, text: str, expected: list[str]) -> None:
    """Merges that would join any two neighbours show where a text is split: across a split none applies."""
    characters = byte_characters()
    spelled = ["".join(characters[byte] for byte in word.encode()) for word in expected]
    joined = {a + b for a, b in pairwise("".join(spelled))}
    tokenizer = Tokenizer.from_gguf(byte_level([f"{pair[0]} {pair[1]}" for pair in sorted(joined)], pre=pre))
    boundaries, at = set(), 0
    for word in expected:
        at += len(word.encode())
        boundaries.add(at)
    tokens = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    ends = {sum(map(len, tokens[: i + 1])) for i in range(len(tokens))}
    assert b"".join(tokens) == text.encode()
    assert boundaries <= ends
    # Within a word of two bytes or more, something was joined.
    assert all(
        len(word.encode()) < 2 or len(tokenizer.encode(word)) < len(word.encode()) for word in expected
    )


def test_llama3_takes_a_whole_word_that_is_a_token() -> None:
    vocabulary = byte_level(["a b"], pre="llama-bpe", extra={"abc": NORMAL})
    assert Tokenizer.from_gguf(vocabulary).encode("abc") == [257]
    assert Tokenizer.from_gguf(vocabulary | {"tokenizer.ggml.pre": "qwen2"}).encode("abc") == [256, 99]


def test_a_control_token_typed_by_a_user_is_text() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(extra={"<|end|>": CONTROL, "<t>": USER_DEFINED}))
    text = "a<|end|><t>"
    assert tokenizer.encode(text) == [*ids("a<|end|>"), 258]
    assert tokenizer.encode(text, parse_special=True) == [97, 257, 258]
    assert tokenizer.decode([97, 257, 258]) == "a<t>"
    assert tokenizer.decode([97, 257, 258], skip_special=False) == text


def test_text_never_turns_into_a_control_token_by_itself() -> None:
    """Llama 3's whole-word rule must not reach a control token made of letters."""
    tokenizer = Tokenizer.from_gguf(byte_level(pre="llama-bpe", extra={"stop": CONTROL}))
    assert tokenizer.encode("stop") == ids("stop")


def test_special_tokens_are_found_leftmost_then_longest() -> None:
    extra = {"<a>": CONTROL, "<a><b>": CONTROL, "b><": CONTROL, "<x": CONTROL}
    tokenizer = Tokenizer.from_gguf(byte_level(extra=extra))
    assert tokenizer.encode("<a><b><a><x", parse_special=True) == [258, 257, 260]
    assert tokenizer.encode("<b><", parse_special=True) == [60, 259]


def test_breaker_keeps_special_text_plain_and_disappears() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(extra={"<e>": CONTROL, "<t>": USER_DEFINED}))
    assert tokenizer.break_special("a<e>b", "\ue000") == "a<\ue000e>b"
    assert tokenizer.encode("<\ue000e><e><t>", parse_special=True, breaker="\ue000") == [
        *ids("<e>"),
        257,
        258,
    ]
    assert tokenizer.break_special("plain text", "\ue000") == "plain text"
    # Halves at the edges, with or without the spaces that templates trim.
    assert tokenizer.break_special("a<e \n", "!") == "a<e! \n"
    assert tokenizer.break_special(" >b", "!") == " !>b"


def test_a_control_token_of_one_character_cannot_be_broken_up_and_is_refused() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(extra={"\ue123": CONTROL}))
    with pytest.raises(RequestError, match="control token of one character"):
        tokenizer.break_special("a\ue123", "!")


@given(st.text("<e>|! a", max_size=12), st.text("<e>|! a", max_size=12), st.text("<e>|! a", max_size=12))
def test_broken_text_gives_no_special_token_wherever_it_stands(before: str, text: str, after: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(extra={"<e>": CONTROL, "<e|e>": CONTROL, "|>": CONTROL}))
    broken = tokenizer.break_special(text, "\ue000")
    got = tokenizer.encode(f"a {broken} a", parse_special=True, breaker="\ue000")
    assert got == ids(f"a {text} a")
    assert broken.replace("\ue000", "") == text


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    extra = {"<s>": CONTROL, "</s>": CONTROL}
    roles = {"bos_token_id": 257, "eos_token_id": 258}
    plain = Tokenizer.from_gguf(byte_level(extra=extra, **roles))
    both = Tokenizer.from_gguf(byte_level(extra=extra, **roles, add_bos_token=True, add_eos_token=True))
    llama3 = Tokenizer.from_gguf(byte_level(extra=extra, pre="llama-bpe", **roles))
    assert plain.encode("a") == [97]
    assert both.encode("a") == [257, 97, 258]
    assert both.encode("a", add_special=False) == [97]
    assert both.encode("") == [257, 258]
    assert (plain.add_bos, both.add_bos, llama3.add_bos) == (False, True, True)


def test_end_of_generation_ids() -> None:
    extra = {"<|im_end|>": CONTROL, "</s>": NORMAL, "<x>": CONTROL, "<y>": CONTROL, "<|eot_id|>": CONTROL}
    tokenizer = Tokenizer.from_gguf(byte_level(extra=extra, eos_token_id=259, eot_token_id=260))
    # "</s>" is ordinary text here, so it ends nothing.
    assert tokenizer.eog_ids == {257, 259, 260, 261}


@given(st.lists(st.integers(0, 255), max_size=40))
def test_invalid_utf8_is_replaced_as_the_tokenizers_library_does(data: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    expected = ByteLevel().decode([byte_characters()[byte] for byte in data])
    assert tokenizer.decode(data) == expected
    assert b"".join(map(tokenizer.token_bytes, data)) == bytes(data)


def test_tokens_outside_the_alphabet_spell_themselves() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(extra={"<｜é｜>": CONTROL, "日": UNUSED, "[PAD9]": UNUSED}))
    assert [tokenizer.token_bytes(i).decode() for i in (257, 258, 259)] == ["<｜é｜>", "日", "[PAD9]"]
    assert tokenizer.token_bytes(byte_characters().index("Ġ")) == b" "


@given(st.text(st.sampled_from("ab \n<e>é你▁"), max_size=60), st.booleans())
@example("▁" * 60, False)
def test_no_text_that_fits_is_refused_unread(text: str, special: bool) -> None:
    extra = {"<e>": CONTROL, "<<": USER_DEFINED}
    for made in (
        byte_level(["a b", "ab a"], extra=extra),
        sentencepiece({"ab": -1.0, "▁a": -2.0, "▁▁▁": -3.0}),
    ):
        tokenizer = Tokenizer.from_gguf(made)
        found = tokenizer.encode(text, parse_special=special)
        assert tokenizer.encode(text, parse_special=special, limit=len(found) + 1) == found


def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(["a b", "ab a"], extra={"<e>": CONTROL}))
    assert tokenizer.encode("aba" * 4, limit=5) == [257] * 4
    words = "the prompt has at least 5 tokens; the context limit is 5"
    with pytest.raises(PromptTooLongError, match=words) as caught:
        tokenizer.encode("aba" * 4 + "a", limit=5)
    assert (caught.value.tokens, caught.value.limit) == (5, 5)
    broken = tokenizer.encode("\U000f0000".join("aba" * 4), breaker="\U000f0000", limit=5)
    assert broken == [257] * 4


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    with pytest.raises(RequestError, match=r"U\+D800 at index 2"):
        tokenizer.encode("ab\ud800c")


def test_a_character_without_tokens_is_refused_rather_than_dropped(smollm2: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    with pytest.raises(RequestError, match=r"U\+0004 at index 3"):
        tokenizer.encode("abc\x04")


@pytest.mark.parametrize("token", [-1, 257, 10**6])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    with pytest.raises(RequestError, match=f"token id {token} is outside 0 to 256"):
        tokenizer.decode([token])
    with pytest.raises(RequestError, match=f"token id {token}"):
        tokenizer.is_special(token)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"model": 3}, "model is of type int"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "tokens is of type str"),
        ({"tokens": ["a", 1]}, "not strings"),
        ({"tokens": ["a\ud800"]}, "not valid UTF-8"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' occurs twice, as ids 0 and 2"),
        ({"token_type": None}, "no tokenizer.ggml.token_type"),
        ({"token_type": [1, 1]}, "2 entries for 257 tokens"),
        ({"token_type": [9] * 257}, "holds 9"),
        ({"token_type": ["x"] * 257}, "not numbers"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["a b", "abc"]}, "'abc' does not join two"),
        ({"merges": ["a b c"]}, "'a b c' does not join two"),
        ({"merges": ["a zz"]}, "do not fit the vocabulary.*zz"),
        ({"merges": ["a c"]}, "do not fit the vocabulary.*ac"),
        ({"bos_token_id": 257}, "bos_token_id is 257, outside the vocabulary of 0 to 256"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": 2**40}, "eot_token_id is"),
        ({"unknown_token_id": "a"}, "unknown_token_id is 'a'"),
        ({"add_bos_token": True}, "there is no bos_token_id"),
        ({"add_bos_token": 1, "bos_token_id": 1}, "neither true nor false"),
    ],
)
def test_damaged_metadata_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    metadata = byte_level()
    for name, value in change.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(metadata)


def test_unknown_tokenizers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'tekken' is not known"):
        Tokenizer.from_gguf(byte_level(pre="tekken"))
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        Tokenizer.from_gguf(byte_level(model="bert"))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.one_of(st.integers(-3, 300), st.floats(), st.text(max_size=3)), max_size=5),
    st.lists(st.text("ab <|>Ġ\ud800", max_size=4), min_size=255, max_size=260),
    st.lists(st.integers(0, 6), min_size=257, max_size=257),
)
KEYS = [name.removeprefix("tokenizer.ggml.") for name in byte_level()]
ROLES = ["bos_token_id", "eos_token_id", "eot_token_id", "add_bos_token", "add_space_prefix", "scores"]


@given(st.dictionaries(st.sampled_from([*KEYS, *ROLES]), JUNK, min_size=1, max_size=3), st.booleans())
def test_junk_metadata_is_refused_or_works(junk: dict[str, Any], llama: bool) -> None:
    metadata = sentencepiece({"a": -1.0}) if llama else byte_level()
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in junk.items()}
    text = "ab <|é"
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
        got = tokenizer.encode(text, add_special=False)
    except (ModelFileError, UnsupportedModelError, RequestError):
        return  # anything else fails the test
    # SentencePiece's space falls back to bytes too where the vocabulary has none.
    spelled = b"".join(map(tokenizer.token_bytes, got)).decode().replace("▁", " ")
    assert spelled in (text, f" {text}") or 0 in got, "only an unknown token may lose text"
