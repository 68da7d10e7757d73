"""Tokenizers that come as tokenizer.json, run by the `tokenizers` library that defines the format.

The library sees plain text only. Added tokens are found before, as for every tokenizer here, so that what a
user wrote is never taken for a control token; a leading space is put by the caller too, since only it knows
what stands before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tokenizers import Tokenizer as Library

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.text.byte_level import missing_bytes, refuse_unspelled, spelled_bytes
from paceline.text.vocabulary import Kind, Lead, Vocabulary, required

_SPACE = "▁"
_RELOAD = "download the folder again"


class LibraryPieces:
    """Encodes plain text (no special tokens), and spells tokens as bytes."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        description = _copy(required(metadata, "json", dict, prefix="tokenizer.huggingface."))
        self._vocabulary = vocabulary
        self._byte_level = _is_byte_level(description)
        self._missing = missing_bytes(vocabulary) if self._byte_level else b""
        if not self._byte_level:
            _refuse_gaps(vocabulary)
        self.lead = _take_lead(description)
        self.whole = self._byte_level and description["normalizer"] is None
        _hide_control_tokens(description, vocabulary)
        self._library = _build(description)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, which must be valid Unicode and hold no user-defined token."""
        if self._missing:
            refuse_unspelled(text, self._missing)
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        kind, text = self._vocabulary.kinds[token], self._vocabulary.tokens[token]
        if kind == Kind.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != Kind.NORMAL:
            return text.encode()
        return spelled_bytes(text) if self._byte_level else text.replace(_SPACE, " ").encode()


def _copy(description: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that matter here, deep where they will be changed: the vocabulary is large."""
    copied = {name: deepcopy(description.get(name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
    model = dict(description["model"])
    return {"version": "1.0", "model": model, **copied}


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a part of the description: of a `Sequence`, or the part itself."""
    found = part.get(name) if isinstance(part, dict) and part.get("type") == "Sequence" else [part]
    return [step for step in found if isinstance(step, dict)] if isinstance(found, list) else []


def _is_byte_level(description: Any) -> bool:
    """Whether tokens spell bytes in GPT-2's alphabet; else they spell text, with a sign for spaces."""
    kinds = [str(step.get("type")) for step in _steps(description.get("decoder"), "decoders")]
    if "ByteLevel" in kinds:
        return True
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise UnsupportedModelError(
        f"tokenizer.json decodes by {', '.join(kinds) or 'nothing'}",
        "byte-level and SentencePiece tokenizers run here",
    )


def _refuse_gaps(vocabulary: Vocabulary) -> None:
    count = len(vocabulary.ids_of(Kind.BYTE))
    if count != 256 and (count or vocabulary.unknown_id is None):
        raise ModelFileError(f"the vocabulary has {count} of 256 byte tokens and no way around", _RELOAD)


def _take_lead(description: dict[str, Any]) -> Lead:
    """Read which parts get a leading space, and keep the library from putting it."""
    lead = Lead.NONE
    for step in _steps(description.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend":
            if step.get("prepend") != _SPACE:
                raise UnsupportedModelError(
                    f"tokenizer.json puts {step.get('prepend')!r} before texts", "only a space is put there"
                )
            step.clear()
            step.update(type="Replace", pattern={"String": _SPACE}, content=_SPACE)  # does nothing
            lead = Lead.ALL
    for step in _steps(description.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            lead = {"always": Lead.UNSPACED, "first": Lead.FIRST}.get(str(scheme), lead)
            step["prepend_scheme"] = "never"
            step.pop("add_prefix_space", None)
    return lead


def _hide_control_tokens(description: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Where whole words are looked up before any merge, a control token must not be among the words."""
    model = description["model"]
    if model.get("ignore_merges"):
        hidden = {vocabulary.tokens[token] for token in vocabulary.ids_of(Kind.CONTROL)}
        model["vocab"] = {text: token for text, token in model["vocab"].items() if text not in hidden}


def _build(description: dict[str, Any]) -> Library:
    try:
        return Library.from_str(json.dumps(description | {"added_tokens": [], "decoder": None}))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception for what it refuses, worse for what it did not expect
        raise ModelFileError(f"tokenizer.json cannot be used: {str(error)[:200]}", _RELOAD) from None
