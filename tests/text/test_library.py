"""Tokenizers from tokenizer.json: the library's own ids, and control tokens that no text can forge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from paceline.errors import ModelFileError, PacelineError, RequestError, UnsupportedModelError
from paceline.text.template import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from paceline.weights.hf_tokenizer import translate
from support.folders import added, tiny_tokenizer_json
from support.text_corpus import corpus
from support.vocabularies import byte_characters

PREPEND = {"type": "Prepend", "prepend": "▁"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "▁a", "ab", "▁ab", "▁▁", "c", "\n"]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sentencepiece(
    normalizer: Any, pre_tokenizer: Any = None, *, strip: bool = True, tokens: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """A tokenizer.json as converters write it for SentencePiece BPE."""
    words = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    vocabulary = {text: i for i, text in enumerate(words)}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *([STRIP] if strip else [])]
    size = len(words)
    return {
        "version": "1.0",
        "added_tokens": [
            added(0, "<unk>"),
            added(1, "<s>"),
            added(2, "</s>"),
            *({**token, "id": size + i} for i, token in enumerate(tokens)),
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": [["▁", "a"], ["a", "b"], ["▁", "ab"], ["▁a", "b"], ["▁", "▁"]],
        },
    }


def byte_level(*, ignore_merges: bool = False, tokens: Sequence[dict[str, Any]] = (), **more: Any) -> Any:
    """A byte-level tokenizer.json with some merges."""
    found = tiny_tokenizer_json()
    merges = [["a", "b"], ["Ġ", "ab"], ["ab", "c"], ["Ã", "©"]]
    words = {text: i for i, text in enumerate(byte_characters())}
    for left, right in merges:
        words[left + right] = len(words)
    found["model"] |= {"vocab": words, "merges": merges, "ignore_merges": ignore_merges}
    found["added_tokens"] = [{**token, "id": len(words) + i} for i, token in enumerate(tokens)]
    return found | more


def built(folder: Path, description: dict[str, Any], **config: Any) -> tuple[Tokenizer, Library]:
    """Our tokenizer of a tokenizer.json, and the library's own."""
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [*description["model"]["vocab"].values(), *(token["id"] for token in description["added_tokens"])]
    metadata = translate(folder, {"vocab_size": max(ids) + 1})
    return Tokenizer.from_gguf(metadata), Library.from_str(json.dumps(description))


METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
KINDS: dict[str, dict[str, Any]] = {
    "byte level": byte_level(tokens=[added(0, "<|x|>"), added(0, "<tool>", special=False)]),
    "byte level, composed first": byte_level(normalizer={"type": "NFC"}),
    "byte level, whole words first": byte_level(ignore_merges=True),
    "llama 2": sentencepiece({"type": "Sequence", "normalizers": [PREPEND, REPLACE]}),
    "llama 2, user-defined tokens": sentencepiece(
        {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, tokens=[added(0, "<tool>", special=False)]
    ),
    "phi 3": sentencepiece(
        {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, tokens=[added(0, "<|x|>", rstrip=True)]
    ),
    "gemma": sentencepiece(REPLACE, strip=False),
    "mistral": sentencepiece(None, METASPACE | {"prepend_scheme": "first"}),
    "metaspace, always": sentencepiece(None, METASPACE | {"prepend_scheme": "always"}),
    "metaspace, old": sentencepiece(
        None, {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    ),
    "metaspace, never": sentencepiece(None, METASPACE | {"prepend_scheme": "never"}, strip=False),
    "stripping both sides": sentencepiece(REPLACE, tokens=[added(0, "<|x|>", lstrip=True, rstrip=True)]),
}
SAMPLES = [
    "", " ", "  ", "a", " a", "ab", " ab ab", "▁a", "abc é e\u0301", "a  b\n\n c", "<s>a", "a<s> b</s> ab",
    "<|x|>a", "a <|x|>  b", "  <|x|> \n <|x|>ab", "<tool> a<tool>b", "日本 😀 a", " <s> ", "<unk> a",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    ours, library = built(tmp_path, KINDS[kind])
    for text in [*SAMPLES, *corpus()]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_that_of_the_library(tmp_path: Path, kind: str) -> None:
    ours, library = built(tmp_path, KINDS[kind])
    for text in [*SAMPLES, *corpus()[::5]]:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == library.decode(ids), text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab c\n▁é<>s/|xtol"), max_size=30))
def test_ids_of_any_text(tmp_path_factory: pytest.TempPathFactory, kind: str, text: str) -> None:
    ours, library = cached(tmp_path_factory, kind)
    expected = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special=False, parse_special=True) == expected


_built: dict[str, tuple[Tokenizer, Library]] = {}


def cached(factory: pytest.TempPathFactory, kind: str) -> tuple[Tokenizer, Library]:
    if kind not in _built:
        _built[kind] = built(factory.mktemp("library"), KINDS[kind])
    return _built[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_a_users_text_are_text(tmp_path: Path, kind: str) -> None:
    ours, _ = built(tmp_path, KINDS[kind])
    ids = ours.encode("a<s>b</s><|x|><unk>", add_special=False)
    assert not any(ours.is_special(token) for token in ids)
    assert ours.decode(ids, skip_special=False) == "a<s>b</s><|x|><unk>"


def test_a_control_token_made_of_letters_stays_out_of_reach(tmp_path: Path) -> None:
    description = byte_level(ignore_merges=True, tokens=[added(0, "stop")])
    description["model"]["vocab"]["stop"] = description["added_tokens"][0]["id"]
    ours, _ = built(tmp_path, description)
    assert ours.encode("stop") == list(b"stop")
    assert ours.encode("stop", parse_special=True) == [description["added_tokens"][0]["id"]]


def test_a_template_over_a_folders_tokenizer(tmp_path: Path) -> None:
    description = KINDS["phi 3"]
    ours, library = built(tmp_path, description)
    template = ChatTemplate("{% for m in messages %}<|x|>\n{{ m.content }}<s>{% endfor %}")
    said = [{"role": "user", "content": "a<s>b"}, {"role": "user", "content": " ab"}]
    with_x = library.token_to_id("<|x|>")
    assert template.encode(ours, said) == [
        with_x,
        *ours.encode("a<s>b", add_special=False),
        1,
        with_x,
        *ours.encode("ab", add_special=False),
        1,
    ]
    template.close()


def test_wrapping_and_ends(tmp_path: Path) -> None:
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    description = KINDS["llama 2"] | {"post_processor": processor}
    ours, library = built(tmp_path, description, bos_token="<s>", eos_token="</s>")
    assert ours.encode("a b") == library.encode("a b").ids
    assert (ours.bos_id, ours.eos_id, ours.add_bos, ours.eog_ids) == (1, 2, True, {2})


def test_bytes_of_single_tokens(tmp_path: Path) -> None:
    ours, library = built(tmp_path, KINDS["llama 2"])
    assert ours.token_bytes(library.token_to_id("<0x0A>")) == b"\n"
    assert ours.token_bytes(library.token_to_id("▁ab")) == b" ab"
    ours, library = built(tmp_path, KINDS["byte level"])
    assert ours.token_bytes(library.token_to_id("Ġab")) == b" ab"
    assert ours.token_bytes(library.token_to_id("<tool>")) == b"<tool>"
    assert ours.token_bytes(0xE9) == b"\xe9"


def test_text_that_cannot_be_spelled(tmp_path: Path) -> None:
    description = byte_level()
    del description["model"]["vocab"]["z"]
    ours, _ = built(tmp_path, description)
    with pytest.raises(RequestError, match=r"the character U\+007A at index 1 has no token"):
        ours.encode("az")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"decoder": None}, UnsupportedModelError, "tokenizer.json decodes by nothing"),
        ({"decoder": {"type": "WordPiece"}}, UnsupportedModelError, "tokenizer.json decodes by WordPiece"),
        ({"normalizer": {"type": "Prepend", "prepend": "x"}}, UnsupportedModelError, "puts 'x' before texts"),
        ({"normalizer": {"type": "Magic"}}, ModelFileError, "tokenizer.json cannot be used: "),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}, ModelFileError, "cannot be used"),
    ],
)
def test_descriptions_that_are_refused(
    tmp_path: Path, change: dict[str, Any], kind: type[PacelineError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        built_only(tmp_path, KINDS["gemma"] | change)
    assert caught.value.hint


def test_a_vocabulary_with_holes(tmp_path: Path) -> None:
    description = json.loads(json.dumps(KINDS["gemma"]))
    del description["model"]["vocab"]["<0x41>"]
    with pytest.raises(ModelFileError, match="255 of 256 byte tokens and no way around"):
        built_only(tmp_path, description)
    description["model"] |= {
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "byte_fallback": False,
    }
    description["model"] |= {"unk_token": None}
    description["added_tokens"] = []
    with pytest.raises(ModelFileError, match="0 of 256 byte tokens and no way around"):
        built_only(tmp_path, description)


def built_only(folder: Path, description: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return Tokenizer.from_gguf(translate(folder, {"vocab_size": 300}))


_parts = st.recursive(
    st.one_of(st.none(), st.integers(-3, 300), st.sampled_from(["BPE", "ByteLevel", "Replace", "▁", ""])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["type", "decoders", "normalizers", "vocab", "id"]), inner, max_size=3
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    change=st.dictionaries(
        st.sampled_from(
            ["decoder", "normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model"]
        ),
        _parts,
        min_size=1,
        max_size=2,
    ),
    inside=st.dictionaries(
        st.sampled_from(["merges", "vocab", "unk_token", "byte_fallback"]), _parts, max_size=1
    ),
)
def test_odd_descriptions_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, change: dict[str, Any], inside: dict[str, Any]
) -> None:
    base = KINDS["gemma"]
    description = base | {"model": {**base["model"], **inside}} | change
    hint = "none needed"
    try:
        built_only(tmp_path_factory.getbasetemp(), description)
    except PacelineError as error:
        hint = error.hint
    assert hint
