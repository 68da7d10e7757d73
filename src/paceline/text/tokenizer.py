"""Text to token ids and back, from the metadata of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

from paceline.errors import PromptTooLongError, RequestError
from paceline.text.byte_level import ByteLevelBPE
from paceline.text.library import LibraryPieces
from paceline.text.sentencepiece import SentencePieceBPE
from paceline.text.vocabulary import Kind, Lead, Vocabulary


class _Pieces(Protocol):
    """What turns plain text, free of special tokens, into ids, and a token into bytes."""

    @property
    def lead(self) -> Lead: ...

    @property
    def whole(self) -> bool:
        """Whether the bytes of the tokens are those of the text, every one of them."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        vocab_size: number of token ids; valid ids are 0 to vocab_size - 1.
        bos_id, eos_id: None where the model has none.
        eog_ids: tokens that end a generation.
        special_ids: tokens that steer the model rather than spelling text; see `is_special`.
        add_bos: whether `encode` puts BOS in front when `add_special` is set.
    """

    def __init__(self, vocabulary: Vocabulary, pieces: _Pieces) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces
        self._marked = _Matcher(vocabulary, (Kind.USER_DEFINED,))
        self._control = _Matcher(vocabulary, (Kind.CONTROL, Kind.UNKNOWN))
        self._special = _Matcher(vocabulary, (Kind.USER_DEFINED, Kind.CONTROL, Kind.UNKNOWN))
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.end_ids
        self.special_ids = frozenset(vocabulary.ids_of(Kind.CONTROL, Kind.UNKNOWN))
        self.add_bos = vocabulary.add_bos

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from `tokenizer.ggml.*`.

        Raises ModelFileError for damaged metadata and UnsupportedModelError for a tokenizer or
        pre-tokenizer that is not known, by name.
        """
        vocabulary = Vocabulary.from_gguf(metadata)
        return cls(vocabulary, _PIECES[vocabulary.model](vocabulary, metadata))

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        breaker: str = "",
        continuing: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of `text`.

        Args:
            add_special: put BOS before and EOS after, where the model wants them.
            parse_special: turn the text of control tokens into those tokens. Without it such text is
                spelled like any other. User-defined tokens are always recognised.
            breaker: a character that keeps text around it from being recognised as a special token
                and is then dropped; chat templates use it on what users wrote.
            continuing: the text follows other text, so SentencePiece's leading space is left out.
            limit: so many tokens are of no use. A text that must have more is refused unread: encoding
                megabytes takes seconds, and hundreds of bytes of memory for each of them.

        Raises:
            RequestError: the text is not valid Unicode, or holds a byte that no token spells.
            PromptTooLongError: it cannot have fewer tokens than `limit`.
        """
        _refuse_what_is_no_text(text)
        if limit is not None and (least := self._least(text, breaker)) >= limit:
            raise PromptTooLongError(least, limit, least=True)
        ids = [self.bos_id] if add_special and self.bos_id is not None and self.add_bos else []
        matcher = self._special if parse_special else self._marked
        ids += self._parts(text, matcher, breaker, opening=not continuing)
        if add_special and self._vocabulary.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuing: bool = False) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD, one per ill-formed sequence.

        Args:
            skip_special: leave out control tokens.
            continuing: the ids follow other text, so a SentencePiece leading space is kept.
        """
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._vocabulary.add_space_prefix and not continuing else text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that the token spells; a control token spells its own name."""
        self._refuse_unknown(token)
        return self._pieces.token_bytes(token)

    def meanings(self, size: int) -> list[bytes | None]:
        """What each id below `size` spells, as `token_bytes`; None for ids that exist only to fill up."""
        known = min(size, self.vocab_size)
        unused = set(self._vocabulary.ids_of(Kind.UNUSED))
        spelled = [None if i in unused else self._pieces.token_bytes(i) for i in range(known)]
        return spelled + [None] * (size - known)

    def is_byte(self, token: int) -> bool:
        """Whether the token is SentencePiece's fallback for one byte."""
        self._refuse_unknown(token)
        return self._vocabulary.kinds[token] == Kind.BYTE

    def is_special(self, token: int) -> bool:
        """Whether the token steers the model rather than spelling text (control and unknown tokens)."""
        self._refuse_unknown(token)
        return self._vocabulary.is_special(token)

    def break_special(self, text: str, breaker: str) -> str:
        """Return `text` with `breaker` inside every control token's text, for `encode` to drop again.

        A control token that only begins at the end of the text, or only ends at its start, is broken
        too, so that it cannot be completed by what a template puts beside it.
        """
        return self._control.break_up(text, breaker)

    def _least(self, text: str, breaker: str) -> int:
        """Fewest tokens that spell `text`; 0 where that cannot be told."""
        swallows = self._vocabulary.left_strip or self._vocabulary.right_strip
        if not self._pieces.whole or swallows:
            return 0
        spelled = text.replace("▁", " ")  # SentencePiece reads both as a space
        if breaker:
            spelled = spelled.replace(breaker, "")
        return -(-len(spelled.encode()) // self._longest_bytes)

    @cached_property
    def _longest_bytes(self) -> int:
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))

    def _parts(
        self, text: str, matcher: _Matcher, breaker: str, opening: bool, first: bool = True
    ) -> list[int]:
        ids: list[int] = []
        first = first and opening
        for part in matcher.split(text):
            if isinstance(part, int):
                ids.append(part)
            elif breaker and breaker in part:
                ids += self._parts(part.replace(breaker, ""), self._marked, "", opening, first)
            else:
                ids += self._pieces.encode(self._lead(part, opening, first) + part)
            opening = isinstance(part, int) and self._vocabulary.is_special(part)
            first = False
        return ids

    def _lead(self, part: str, opening: bool, first: bool) -> str:
        """What is put before a part: of a text's start, or of what follows a control token."""
        wanted = {
            Lead.NONE: False,
            Lead.OPENING: opening,
            Lead.ALL: True,
            Lead.UNSPACED: part[0] not in " ▁",
            Lead.FIRST: first and part[0] not in " ▁",
        }
        return " " if wanted[self._pieces.lead] else ""

    def _refuse_unknown(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise RequestError(
                f"token id {token} is outside 0 to {self.vocab_size - 1}", "check the token ids"
            )


_PIECES: dict[str, Callable[[Vocabulary, Mapping[str, Any]], _Pieces]] = {
    "gpt2": ByteLevelBPE,
    "llama": SentencePieceBPE,
    "tokenizer.json": LibraryPieces,
}
"""By `tokenizer.ggml.model`."""


class _Matcher:
    """Finds whole tokens of some kinds in text: leftmost first, longest first.

    Candidates are found by their first two characters and then looked up by length, so thousands of
    tokens cost no more than a few.
    """

    def __init__(self, vocabulary: Vocabulary, kinds: tuple[Kind, ...]) -> None:
        self._ids = {vocabulary.tokens[i]: i for i in vocabulary.ids_of(*kinds) if vocabulary.tokens[i]}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        self._longest_text = max(map(len, self._ids), default=0)
        self._left_strip, self._right_strip = vocabulary.left_strip, vocabulary.right_strip
        self._start = _any_of(self._lengths)

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the plain parts, as text, and the tokens between them, as ids, in order."""
        done = at = 0
        while self._start and (found := self._start.search(text, at)):
            at = found.start()
            token = self._longest(text, at)
            if token is None:
                at += 1
                continue
            number = self._ids[token]
            before = text[done:at]
            if number in self._left_strip:
                before = before.rstrip()
            if before:
                yield before
            yield number
            done = at = at + len(token)
            if number in self._right_strip:
                done = at = len(text) - len(text[at:].lstrip())
        if done < len(text):
            yield text[done:]

    def break_up(self, text: str, breaker: str) -> str:
        """Put `breaker` after the first character of every match, and at halves of one at the edges."""
        cuts = {0, len(text)}
        at = 0
        # Every occurrence, not only those that `split` takes: breaking one may uncover another.
        while self._start and (found := self._start.search(text, at)):
            at = found.start() + 1
            if text[at - 1] in self._ids:
                raise RequestError(
                    f"the text holds {text[at - 1]!r}, a control token of one character", "remove it"
                )
            if self._longest(text, at - 1) is not None:
                cuts.add(at)
        body = text.strip()  # templates trim
        reach = range(1, min(self._longest_text, len(body)) + 1)
        if any(body[:n] in self._endings for n in reach):
            cuts.add(len(text) - len(text.lstrip()))
        if any(body[-n:] in self._beginnings for n in reach):
            cuts.add(len(text.rstrip()))
        ordered = sorted(cuts)
        return breaker.join(text[a:b] for a, b in pairwise(ordered))

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._ids for n in range(1, len(text)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[-n:] for text in self._ids for n in range(1, len(text)))

    def _longest(self, text: str, at: int) -> str | None:
        for start in (text[at : at + 2], text[at]):
            for length in self._lengths.get(start, ()):
                if (part := text[at : at + length]) in self._ids:
                    return part
        return None


def _any_of(starts: Iterable[str]) -> re.Pattern[str] | None:
    """Compile a search for any of these one or two characters, grouped so that it stays fast."""
    seconds: dict[str, str] = {}
    for start in starts:
        seconds[start[0]] = seconds.get(start[0], "") + start[1:]
    alone = [start for start in starts if len(start) == 1]
    pairs = [f"{re.escape(first)}[{re.escape(found)}]" for first, found in seconds.items() if found]
    patterns = [*pairs, *map(re.escape, alone)]
    return re.compile("|".join(patterns)) if patterns else None


def _refuse_what_is_no_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"the text is of type {type(text).__name__}", "give a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X}"
            f" at index {error.start}",
            "decode the input as UTF-8 before passing it on",
        ) from None
