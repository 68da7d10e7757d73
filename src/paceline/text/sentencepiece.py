"""SentencePiece's BPE: of all neighbouring pairs that form a token, join the one with the best score.

Ties go to the leftmost pair, and what no token spells falls back to bytes. This is the algorithm of
the SentencePiece library (Kudo and Richardson 2018), not a ranked list of merges rebuilt from the
vocabulary: a list cannot say that two splits of one token are equally good, and takes seconds to
build for 262k tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Any

from paceline.errors import ModelFileError
from paceline.text.vocabulary import Kind, Lead, Vocabulary, numbers

SPACE = "▁"
_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_WORD_OVER_SPACE = re.compile(f"[^{SPACE}]{SPACE}")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_CACHED_WORDS = 1 << 15
_CACHED_LENGTH = 64


class SentencePieceBPE:
    """Encodes plain text (no special tokens), and spells tokens as bytes."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        scores = numbers(metadata, "scores", len(vocabulary.tokens))
        if not all(map(math.isfinite, scores)):
            raise ModelFileError(
                "tokenizer.ggml.scores holds values that are not finite", "download it again"
            )
        self._vocabulary = vocabulary
        self.lead = Lead.OPENING if vocabulary.add_space_prefix else Lead.NONE
        self._scores = scores
        self._ids = vocabulary.spellings()
        for token in vocabulary.ids_of(Kind.USER_DEFINED):  # found whole before, never joined from parts
            self._ids.pop(vocabulary.tokens[token], None)
        self._byte_of = self._bytes()
        self._id_of_byte = {byte: i for i, byte in self._byte_of.items()}
        if len(self._id_of_byte) not in (0, 256) or (not self._id_of_byte and vocabulary.unknown_id is None):
            raise ModelFileError(
                f"the vocabulary has {len(self._id_of_byte)} of 256 byte tokens and no way around",
                "download the file again",
            )
        # Words can be joined on their own unless some token reaches from a word into the next space.
        crossing = any(_WORD_OVER_SPACE.search(text) for text in self._ids)
        self.whole = len(self._id_of_byte) > 0  # else unknown characters become one token
        self._words = re.compile("(?s).+") if crossing else _WORD
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, which must be valid Unicode; any prefix space is the caller's."""
        ids: list[int] = []
        for word in self._words.findall(text.replace(" ", SPACE)):
            ids += self._cached(word)
        return ids if self._id_of_byte else self._fuse_unknown(ids)

    def token_bytes(self, token: int) -> bytes:
        kind = self._vocabulary.kinds[token]
        text = self._vocabulary.tokens[token]
        if kind == Kind.BYTE:
            return bytes([self._byte_of[token]])
        return (text if kind in (Kind.CONTROL, Kind.UNKNOWN) else text.replace(SPACE, " ")).encode()

    def _bytes(self) -> dict[int, int]:
        values = {}
        for i in self._vocabulary.ids_of(Kind.BYTE):
            match = _BYTE.fullmatch(self._vocabulary.tokens[i])
            if match is None:
                raise ModelFileError(
                    f"byte token {i} is spelled {self._vocabulary.tokens[i]!r}, not like '<0x0A>'",
                    "download the file again",
                )
            values[i] = int(match[1], 16)
        return values

    def _cached(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = [i for piece in self._join(word) for i in self._spell(piece)]
            if len(word) <= _CACHED_LENGTH:
                if len(self._cache) >= _CACHED_WORDS:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _join(self, word: str) -> list[str]:
        """Join neighbours, best score first, leftmost on ties, until no pair forms a token."""
        pieces = list(word)
        after = [*range(1, len(pieces)), -1]
        before = [*range(-1, len(pieces) - 1)]
        ids, scores = self._ids, self._scores
        heap: list[tuple[float, int, int, str]] = []
        for left in range(len(pieces) - 1):
            pair = pieces[left] + pieces[left + 1]
            if pair in ids:
                heap.append((-scores[ids[pair]], left, left + 1, pair))
        heapify(heap)
        while heap:
            _, left, right, pair = heappop(heap)
            # Stale when either side has been joined to something else since.
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != len(pair):
                continue
            pieces[left], pieces[right] = pair, ""
            following = after[left] = after[right]
            if following >= 0:
                before[following] = left
            for a, b in ((before[left], left), (left, following)):
                if a >= 0 and b >= 0 and (pair := pieces[a] + pieces[b]) in ids:
                    heappush(heap, (-scores[ids[pair]], a, b, pair))
        return [piece for piece in pieces if piece]

    def _spell(self, piece: str) -> list[int]:
        token = self._ids.get(piece)
        if token is not None:
            return [token]
        if self._id_of_byte:
            return [self._id_of_byte[byte] for byte in piece.encode()]
        assert self._vocabulary.unknown_id is not None  # checked when built
        return [self._vocabulary.unknown_id]

    def _fuse_unknown(self, ids: list[int]) -> list[int]:
        unknown = self._vocabulary.unknown_id
        return [i for n, i in enumerate(ids) if i != unknown or n == 0 or ids[n - 1] != unknown]
