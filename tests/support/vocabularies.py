"""Tokenizer metadata as GGUF files hold it, small enough to work ids out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_characters() -> list[str]:
    """Return GPT-2's characters for the bytes 0 to 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def byte_level(
    merges: Sequence[str] = ("a b",),
    *,
    pre: str = "gpt-2",
    extra: Mapping[str, int] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """Byte-level BPE: ids 0 to 255 are the bytes, then the merges' results, then `extra` (text to kind).

    `metadata` are further `tokenizer.ggml.` keys; None removes one.
    """
    tokens = byte_characters() + ["".join(merge.split(" ")) for merge in merges] + list(extra or {})
    kinds = [NORMAL] * (256 + len(merges)) + list((extra or {}).values())
    return _metadata("gpt2", tokens, kinds, {"pre": pre, "merges": list(merges), **metadata})


def sentencepiece(
    pieces: Mapping[str, float], *, extra: Mapping[str, int] | None = None, **metadata: Any
) -> dict[str, Any]:
    """SentencePiece: 0 <unk>, 1 <s>, 2 </s>, 3 to 258 the bytes, then `pieces` with scores, then `extra`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *(extra or {})]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), *(extra or {}).values()]
    scores = [0.0] * 259 + list(pieces.values()) + [0.0] * len(extra or {})
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return _metadata("llama", tokens, kinds, {"scores": scores, **ids, **metadata})


def _metadata(model: str, tokens: list[str], kinds: list[int], rest: dict[str, Any]) -> dict[str, Any]:
    values = {"model": model, "tokens": tokens, "token_type": kinds, **rest}
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}
