"""A real tokenizer over a vocabulary that fits on a page: one token per byte, a few merges, BOS and EOS."""

from __future__ import annotations

from typing import Any

from paceline.text.tokenizer import Tokenizer

_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_MOVED = [byte for byte in range(256) if byte not in set(_PLAIN)]
ALPHABET = {b: chr(b) for b in _PLAIN} | {b: chr(256 + i) for i, b in enumerate(_MOVED)}


def spell(data: bytes) -> str:
    return "".join(ALPHABET[byte] for byte in data)


_EMOJI = "😀".encode()
_MERGES = [
    (spell(_EMOJI[:1]), spell(_EMOJI[1:2])),
    (spell(_EMOJI[2:3]), spell(_EMOJI[3:])),
    ("E", "N"),
    (spell(b" "), "T"),
]

VOCAB_SIZE = 256 + len(_MERGES) + 2
BOS = VOCAB_SIZE - 2
EOS = VOCAB_SIZE - 1


def metadata(*, bos: bool = True) -> dict[str, Any]:
    """`tokenizer.ggml.*` of the vocabulary: id = byte, then the merges, then BOS and EOS."""
    tokens = [ALPHABET[byte] for byte in range(256)] + [a + b for a, b in _MERGES] + ["<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in _MERGES],
        "tokenizer.ggml.eos_token_id": EOS,
        **({"tokenizer.ggml.bos_token_id": BOS, "tokenizer.ggml.add_bos_token": True} if bos else {}),
    }


def tiny_tokenizer(*, bos: bool = True) -> Tokenizer:
    return Tokenizer.from_gguf(metadata(bos=bos))
