"""A vocabulary as GGUF metadata describes it, checked before anything is built from it.

Key names are those of the GGUF specification (`tokenizer.ggml.*`). What ends a generation is decided
as llama.cpp decides it: by the ids the file names, and by well-known texts of control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError

_PREFIX = "tokenizer.ggml."
_FOLDER = "tokenizer.huggingface."
_RECONVERT = "the file is damaged or was written by a faulty converter; download or convert it again"


class Kind(IntEnum):
    """GGUF's `token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Lead(Enum):
    """Which parts of a text, cut at its special tokens, get a leading space."""

    NONE = "none"
    OPENING = "at the start, and after control tokens"
    ALL = "all"
    UNSPACED = "all that do not begin with one"
    FIRST = "the first, if it does not begin with one"


_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
        # Fill-in-the-middle separators: a model that writes one has left its answer.
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    }
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens, their kinds and the ids with a role.

    Attributes:
        model: `gpt2` (byte-level BPE), `llama` (SentencePiece), or `tokenizer.json`, whatever that says.
        tokens: [n] texts as the file spells them.
        kinds: [n] `Kind` of each token.
        unusual: ids of the tokens that are not of kind NORMAL, few in most vocabularies.
        bos_id, eos_id, unknown_id: None where the file names none.
        end_ids: tokens that end a generation.
        add_bos, add_eos: whether a prompt is wrapped in them.
        add_space_prefix: SentencePiece's leading space, which decoding drops again.
        left_strip, right_strip: tokens that swallow the white space before or after them.
    """

    model: str
    tokens: list[str]
    kinds: list[int]
    unusual: list[int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    left_strip: frozenset[int] = frozenset()
    right_strip: frozenset[int] = frozenset()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read and check; raises ModelFileError for damage, UnsupportedModelError for an unknown model."""
        model = required(metadata, "model", str)
        if model not in ("gpt2", "llama", "tokenizer.json"):
            raise UnsupportedModelError(
                f"{_PREFIX}model is {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)",
                "use a model with one of these tokenizers",
            )
        tokens = strings(metadata, "tokens")
        kinds = numbers(metadata, "token_type", len(tokens))
        if not set(kinds) <= set(Kind):
            odd = next(k for k in kinds if k not in set(Kind))
            raise ModelFileError(f"{_PREFIX}token_type holds {odd}; known kinds are 0 to 6", _RECONVERT)
        _refuse_duplicates(tokens)
        ids = {name: _role(metadata, name, tokens, kinds) for name in ("bos", "eos", "unknown", "padding")}
        llama = model == "llama"
        return cls(
            model=model,
            tokens=tokens,
            kinds=kinds,
            unusual=[i for i, kind in enumerate(kinds) if kind != Kind.NORMAL],
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            unknown_id=ids["unknown"],
            end_ids=_end_ids(metadata, tokens, kinds, ids["eos"]),
            add_bos=_wrap(metadata, "bos", ids["bos"], llama or _is_llama3(metadata)),
            add_eos=_wrap(metadata, "eos", ids["eos"], False),
            add_space_prefix=model != "gpt2" and _flag(metadata, "add_space_prefix", llama),
            left_strip=frozenset(metadata.get(_FOLDER + "lstrip", ())),
            right_strip=frozenset(metadata.get(_FOLDER + "rstrip", ())),
        )

    def is_special(self, token: int) -> bool:
        """Whether the token steers the model rather than spelling text."""
        return self.kinds[token] in (Kind.CONTROL, Kind.UNKNOWN)

    def ids_of(self, *kinds: Kind) -> list[int]:
        """Return the ids of these kinds, of which NORMAL is none."""
        return [i for i in self.unusual if self.kinds[i] in kinds]

    def spellings(self) -> dict[str, int]:
        """Return text to id of the tokens that spell text.

        Control, unknown and byte tokens stay out, so that no text can turn into one by itself.
        """
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        for token in self.ids_of(Kind.CONTROL, Kind.UNKNOWN, Kind.BYTE):
            ids.pop(self.tokens[token], None)
        ids.pop("", None)
        return ids


def required(metadata: Mapping[str, Any], name: str, kind: type, *, prefix: str = _PREFIX) -> Any:
    """Return `tokenizer.ggml.<name>`, or one with another prefix, which must be there and of this type."""
    value = metadata.get(prefix + name)
    if value is None:
        raise ModelFileError(f"the file has no {prefix}{name}", "use a file that carries its own tokenizer")
    if not isinstance(value, kind):
        raise ModelFileError(
            f"{prefix}{name} is of type {type(value).__name__}, not {kind.__name__}", _RECONVERT
        )
    return value


def strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    """Return an array of valid Unicode strings."""
    values: list[Any] = required(metadata, name, list)
    if not values:
        raise ModelFileError(f"{_PREFIX}{name} is empty", _RECONVERT)
    if set(map(type, values)) != {str}:
        raise ModelFileError(f"{_PREFIX}{name} holds values that are not strings", _RECONVERT)
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        raise ModelFileError(f"{_PREFIX}{name} holds text that is not valid UTF-8", _RECONVERT) from None
    return values


def numbers(metadata: Mapping[str, Any], name: str, length: int) -> list[Any]:
    """Return an array of `length` numbers."""
    values: list[Any] = required(metadata, name, list)
    if len(values) != length:
        raise ModelFileError(f"{_PREFIX}{name} has {len(values)} entries for {length} tokens", _RECONVERT)
    if not set(map(type, values)) <= {int, float}:
        raise ModelFileError(f"{_PREFIX}{name} holds values that are not numbers", _RECONVERT)
    return values


def _refuse_duplicates(tokens: list[str]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    first: dict[str, int] = {}
    for i, text in enumerate(tokens):
        # Empty texts spell nothing and are looked up by nobody.
        if text and first.setdefault(text, i) != i:
            raise ModelFileError(f"token {text!r} occurs twice, as ids {first[text]} and {i}", _RECONVERT)


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < size:
        raise ModelFileError(f"{key} is {value!r}, outside the vocabulary of 0 to {size - 1}", _RECONVERT)
    return value


def _role(metadata: Mapping[str, Any], name: str, tokens: list[str], kinds: list[int]) -> int | None:
    token = _token_id(metadata, name, len(tokens))
    if token is not None or metadata[_PREFIX + "model"] != "llama":
        return token
    usual = _SENTENCEPIECE_IDS.get(name)
    special = usual is not None and usual < len(kinds) and kinds[usual] in (Kind.CONTROL, Kind.UNKNOWN)
    return usual if special else None


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if type(value) is not bool:
        raise ModelFileError(f"{_PREFIX}{name} is {value!r}, neither true nor false", _RECONVERT)
    return value


def _wrap(metadata: Mapping[str, Any], name: str, token: int | None, default: bool) -> bool:
    wanted = _flag(metadata, f"add_{name}_token", default and token is not None)
    if wanted and token is None:
        raise ModelFileError(
            f"{_PREFIX}add_{name}_token is true, but there is no {name}_token_id", _RECONVERT
        )
    return wanted


def _is_llama3(metadata: Mapping[str, Any]) -> bool:
    return metadata.get(_PREFIX + "pre") in ("llama-bpe", "llama3", "llama-v3")


def _end_ids(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], eos: int | None
) -> frozenset[int]:
    named = {eos, *(_token_id(metadata, name, len(tokens)) for name in _END_KEYS)}
    named |= set(metadata.get(_FOLDER + "eos_token_ids", ()))
    texts = {i for i, text in enumerate(tokens) if text in _END_TEXTS and kinds[i] == Kind.CONTROL}
    return frozenset(texts | {i for i in named if i is not None})
