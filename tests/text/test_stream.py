"""Streaming: the joined pieces are the whole text, and nothing is shown that must be taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text.stream import StreamDecoder
from paceline.text.tokenizer import Tokenizer
from support.vocabularies import CONTROL, byte_level, sentencepiece

BYTES = Tokenizer.from_gguf(byte_level(["a b", "ab c"], extra={"<|end|>": CONTROL}))
SPACED = Tokenizer.from_gguf(sentencepiece({"▁": -9.0, "a": -8.0, "▁a": -1.0, "b": -2.0}))
WORDS = ["", "a", "ab", "aba", "bb", "é", "日本", "👩‍👧", "\ufffd", " ", "END", "N"]


def stream(
    tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], StreamDecoder]:
    decoder = StreamDecoder(tokenizer, stop)
    pieces = [decoder.push(token) for token in tokens]
    pieces.append(decoder.finish())
    assert decoder.text == "".join(pieces)
    return pieces, decoder


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, said plainly: the earliest end wins, then the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60))
def test_joined_pieces_are_the_decoded_text(tokens: list[int]) -> None:
    pieces, _ = stream(BYTES, tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


@given(st.lists(st.integers(0, SPACED.vocab_size - 1), max_size=60))
def test_joined_pieces_of_a_sentencepiece_text_keep_the_leading_space(tokens: list[int]) -> None:
    pieces, _ = stream(SPACED, tokens)
    assert "".join(pieces) == SPACED.decode(tokens, continuing=True)


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_valid_text_is_never_shown_half(text: str) -> None:
    decoder = StreamDecoder(BYTES)
    shown = 0
    for at, byte in enumerate(text.encode()):
        shown += len(decoder.push(byte))
        whole = len(text.encode()[: at + 1].decode("utf-8", "ignore"))
        assert shown == whole
    assert decoder.finish() == ""


@given(
    st.lists(st.sampled_from([*WORDS, "c"]), max_size=12).map("".join),
    st.lists(st.text("abcEND\ufffd日é", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple),
    st.data(),
)
def test_text_is_cut_before_the_stop_string_that_completes_first(
    text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    tokens: list[int] = []
    while len(b"".join(map(BYTES.token_bytes, tokens))) < len(text.encode()):
        rest = text.encode()[len(b"".join(map(BYTES.token_bytes, tokens))) :]
        fitting = [i for i in range(258) if rest.startswith(BYTES.token_bytes(i))]
        tokens.append(data.draw(st.sampled_from(fitting)))
    pieces, decoder = stream(BYTES, tokens, stops)
    assert ("".join(pieces), decoder.stopped) == cut(text, stops)
    # Nothing shown at any time may have been taken back.
    assert all(cut(text, stops)[0].startswith("".join(pieces[:n])) for n in range(len(pieces)))


@given(
    st.text("ab日", max_size=20), st.lists(st.text("ab日", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_no_more_is_held_back_than_may_be_a_stop_string(text: str, stops: list[str]) -> None:
    decoder = StreamDecoder(BYTES, stops)
    for byte in text.encode():
        decoder.push(byte)
    if decoder.stopped is None:
        held = text[len(decoder.text) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(
            stop.startswith(text[at:]) for stop in stops for at in range(len(decoder.text)) if text[at:]
        )


def test_x11_a_stop_string_over_several_tokens_never_shows() -> None:
    pieces, decoder = stream(BYTES, list(b"one E two EN three END four"), ("END",))
    assert "".join(pieces) == "one E two EN three "
    assert decoder.stopped == "END"
    # Held back while it might be one, given out as soon as it is not.
    assert pieces[4:6] == ["", "E "]


def test_x12_the_stop_string_that_completes_first_wins() -> None:
    text = " The user is a ..."
    pieces, decoder = stream(BYTES, list(text.encode()), ("a", "is", ","))
    assert ("".join(pieces), decoder.stopped) == (" The user ", "is")


def test_x13_characters_over_several_tokens_come_whole() -> None:
    emoji = Tokenizer.from_gguf(byte_level(["ð Ł", "ĺ Ģ"]))
    tokens = [*emoji.encode("😀"), *"日本".encode()]
    assert len(emoji.encode("😀")) == 2
    pieces, _ = stream(emoji, tokens)
    assert pieces == ["", "😀", "", "", "日", "", "", "本", ""]


def test_a_stop_string_inside_one_token() -> None:
    pieces, decoder = stream(BYTES, [257, 97], ("b",))  # "abc", "a"
    assert (pieces, decoder.stopped) == (["a", "", ""], "b")


def test_of_two_stop_strings_that_complete_together_the_longer_wins() -> None:
    pieces, decoder = stream(BYTES, list(b"xaab"), ("b", "ab"))
    assert ("".join(pieces), decoder.stopped) == ("xa", "ab")


def test_control_tokens_have_no_text_and_do_not_break_a_character() -> None:
    pieces, _ = stream(BYTES, [0xC3, 258, 0xA9])
    assert pieces == ["", "", "é", ""]


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    assert stream(BYTES, list("a👩".encode()[:-1]))[0] == ["a", "", "", "", "\ufffd"]
    pieces, decoder = stream(BYTES, list("a👩".encode()[:-1]), ("\ufffd",))
    assert ("".join(pieces), decoder.stopped) == ("a", "\ufffd")


def test_nothing_follows_a_stop() -> None:
    decoder = StreamDecoder(BYTES, ("a",))
    assert [decoder.push(t) for t in b"xab"] == ["x", "", ""]
    assert (decoder.finish(), decoder.text) == ("", "x")


def test_work_per_token_does_not_grow_with_the_text() -> None:
    """Counted, not timed: characters stepped through equal characters pushed, at any length."""
    decoder = StreamDecoder(BYTES, ("aaaaaaab", "ba"))
    assert decoder._stops is not None
    steps = 0
    step = decoder._stops._step

    def counted(state: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return step(state, char)

    decoder._stops._step = counted  # type: ignore[method-assign]
    for _ in range(32_768):
        decoder.push(97)
    assert steps == 32_768
    assert len(decoder._stops._held) == 7


@pytest.mark.parametrize("stops", [("aa", "aab"), ("ab", "b", "abab"), ("a",), ("abc", "bc", "c")])
def test_all_short_texts(stops: tuple[str, ...]) -> None:
    """Every text over three letters up to length six, against the plain rule."""
    texts = [""]
    for _ in range(6):
        texts = texts[:1] + [text + letter for text in texts for letter in "abc"]
        for text in texts:
            pieces, decoder = stream(BYTES, list(text.encode()), stops)
            assert ("".join(pieces), decoder.stopped) == cut(text, stops)
