"""SentencePiece vocabularies: ids worked out by hand, and ids that the sentencepiece library gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelFileError
from paceline.text.tokenizer import Tokenizer
from support.text_corpus import corpus, digest
from support.vocabularies import BYTE, CONTROL, USER_DEFINED, sentencepiece

RECORDED = json.loads(Path(__file__).with_name("recorded").joinpath("sentencepiece.json").read_text("utf-8"))
FIRST = 259  # id of the first piece in a synthetic vocabulary


@pytest.mark.parametrize("name", RECORDED)
def test_ids_equal_the_sentencepiece_library_on_the_corpus(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(RECORDED[name]["metadata"])
    texts = [text for text in corpus() if "▁" not in text]
    got = [tokenizer.encode(text, add_special=False) for text in texts]
    recorded = RECORDED[name]["text"]
    for index, expected in recorded["full"].items():
        assert got[int(index)] == expected, texts[int(index)]
    digests = recorded["digests"].split()
    assert [texts[i] for i, g in enumerate(got) if digest(g) != digests[i]] == []
    assert len(digests) == len(texts)
    if name != "no-bytes":
        assert [tokenizer.decode(g) for g in got] == texts


def test_the_best_score_joins_first_and_ties_go_left() -> None:
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "ab": -1.0, "ba": -1.0, "aa": -0.5}
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces, add_space_prefix=False, add_bos_token=False))
    a, ab, ba, aa = FIRST + 1, FIRST + 3, FIRST + 4, FIRST + 5
    assert tokenizer.encode("aba") == [ab, a]  # ab and ba score the same
    assert tokenizer.encode("baab") == [FIRST + 2, aa, FIRST + 2]  # aa scores best
    assert tokenizer.encode("bab") == [ba, FIRST + 2]


def test_a_token_over_a_space_is_reached() -> None:
    pieces = {"▁": -9.0, "a": -9.0, "a▁": -1.0, "a▁a": -0.5}
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("a a") == [FIRST + 3]


def test_text_at_the_start_and_after_a_special_token_begins_with_a_space() -> None:
    pieces = {"▁": -9.0, "a": -9.0, "▁a": -1.0, "▁▁": -2.0}
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces, extra={"<t>": USER_DEFINED}))
    space, a, space_a, spaces, t = range(FIRST, FIRST + 5)
    assert tokenizer.encode("a") == [1, space_a]
    assert tokenizer.encode(" a") == [1, space, space_a]
    assert tokenizer.encode("  ") == [1, spaces, space]
    assert tokenizer.encode("</s>a", parse_special=True) == [1, 2, space_a]
    assert tokenizer.encode("<t>a") == [1, t, a]  # user-defined tokens are part of the text
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("aa", add_special=False) == [space_a, a]


def test_decoding_drops_the_leading_space_unless_text_came_before() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece({"▁": -9.0, "a": -9.0, "▁a": -1.0}))
    assert tokenizer.decode([1, FIRST + 2, FIRST + 2]) == "a a"
    assert tokenizer.decode([FIRST + 2, FIRST + 2], continuing=True) == " a a"


def test_what_no_piece_spells_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece({"▁": -9.0}, add_space_prefix=False))
    assert tokenizer.encode("é\n") == [1, 3 + 0xC3, 3 + 0xA9, 3 + 0x0A]
    assert tokenizer.decode([3 + 0xC3, 3 + 0xA9, 3 + 0xFF]) == "é\ufffd"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


def test_typed_control_and_byte_tokens_are_text() -> None:
    pieces = {piece: -float(i) for i, piece in enumerate(("▁", "<", "s", ">", "s>", "0", "x", "4", "1"))}
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces, add_space_prefix=False, add_bos_token=False))
    # "<" and "s>" stay apart although "<s>" is in the vocabulary.
    assert tokenizer.encode("<s>") == [FIRST + 1, FIRST + 4]
    assert tokenizer.encode("<0x41>") == [FIRST + i for i in (1, 5, 6, 7, 8, 3)]
    assert tokenizer.encode("<s>", parse_special=True) == [1]


def test_spelling_of_special_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece({"▁": -1.0}, extra={"▁<PRE>": CONTROL, "  ": USER_DEFINED}))
    assert tokenizer.token_bytes(FIRST + 1).decode() == "▁<PRE>"
    assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"
    assert tokenizer.is_special(0)


def test_defaults_of_files_that_name_no_roles() -> None:
    metadata = sentencepiece({"▁": -1.0}, bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.eog_ids == {2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "1 entries for 260 tokens"),
        ({"scores": [float("nan")] * 260}, "not finite"),
        ({"tokens": ["<unk>", "x", *map(str, range(258))]}, "byte token 3 is spelled '1'"),
        ({"token_type": [2, 3, 3, 6] + [1] * 256}, "1 of 256 byte tokens"),
        ({"add_space_prefix": "yes"}, "neither true nor false"),
    ],
)
def test_damaged_metadata_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    metadata = sentencepiece({"▁": -1.0})
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(metadata)


def test_a_vocabulary_without_bytes_or_unknown_token_is_refused() -> None:
    metadata = sentencepiece({"▁": -1.0}, unknown_token_id=None)
    metadata["tokenizer.ggml.token_type"] = [
        1 if kind in (2, BYTE) else kind for kind in metadata["tokenizer.ggml.token_type"]
    ]
    with pytest.raises(ModelFileError, match="0 of 256 byte tokens"):
        Tokenizer.from_gguf(metadata)
