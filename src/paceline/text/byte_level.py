"""Byte-level BPE: GPT-2's alphabet of 256 printable characters, one per byte, and ranked merges.

The splits are those that the models' own `tokenizer.json` files name, under the names that GGUF
files give them. `default` has no such file; it is what llama.cpp does under that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from paceline.errors import ModelFileError, RequestError, UnsupportedModelError, suggest
from paceline.text.vocabulary import Kind, Lead, Vocabulary, required, strings

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (_MODERN % "{1,3}",)
_SPLITS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_MODERN % "",),
    "deepseek-r1-qwen": (_MODERN % "",),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}


def split_patterns(pre: str) -> tuple[str, ...]:
    """The patterns that a pre-tokenizer isolates, one after the other."""
    if pre not in _SPLITS:
        raise UnsupportedModelError(f"pre-tokenizer {pre!r} is not known", suggest(pre, list(_SPLITS)))
    return _SPLITS[pre]


def _alphabet() -> dict[int, str]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the rest are moved above U+00FF."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(plain)]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(moved)}


_ALPHABET = _alphabet()
_TO_LATIN1 = {ord(char): byte for byte, char in _ALPHABET.items()}


class ByteLevelBPE:
    """Encodes plain text (no special tokens), and spells tokens as bytes."""

    lead = Lead.NONE
    whole = True

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        pre = required(metadata, "pre", str)
        patterns = split_patterns(pre)
        self._vocabulary = vocabulary
        ids = vocabulary.spellings()
        self._unspelled = missing_bytes(vocabulary)
        # Llama 3 takes a whole word that is a token without walking the merges to it.
        self._tokenizer = Tokenizer(_bpe(ids, _merges(metadata), ignore_merges=patterns is _LLAMA3))
        self._tokenizer.pre_tokenizer = _pre_tokenizer(patterns)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, which must be valid Unicode."""
        if self._unspelled:
            refuse_unspelled(text, self._unspelled)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        text = self._vocabulary.tokens[token]
        if self._vocabulary.kinds[token] in (Kind.NORMAL, Kind.UNUSED, Kind.UNDEFINED):
            return spelled_bytes(text)
        return text.encode()


def spelled_bytes(text: str) -> bytes:
    """The bytes that a token spells in the alphabet; one that holds other characters spells itself."""
    try:
        return text.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def missing_bytes(vocabulary: Vocabulary) -> bytes:
    """The bytes that no token spells."""
    ids = vocabulary.spellings()
    return bytes(byte for byte, char in _ALPHABET.items() if char not in ids)


def refuse_unspelled(text: str, missing: bytes) -> None:
    """Raise RequestError for text that holds a byte that no token spells."""
    data = text.encode()
    if len(data.translate(None, missing)) == len(data):
        return
    index, char = next((i, c) for i, c in enumerate(text) if set(c.encode()) & set(missing))
    raise RequestError(
        f"the character U+{ord(char):04X} at index {index} has no token in this model's vocabulary",
        "remove or replace it",
    )


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in strings(metadata, "merges")]
    if set(map(len, pairs)) != {2}:
        odd = next(pair for pair in pairs if len(pair) != 2)
        raise ModelFileError(f"merge {' '.join(odd)!r} does not join two tokens", "download the file again")
    return pairs  # type: ignore[return-value]


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool) -> BPE:
    try:
        return BPE(ids, merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(
            f"the merges do not fit the vocabulary: {error}", "download the file again"
        ) from None


def _pre_tokenizer(patterns: tuple[str, ...]) -> PreTokenizer:
    splits: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
