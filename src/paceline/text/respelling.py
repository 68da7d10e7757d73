"""The same text in another model's tokens, kept up while it grows; and that model's drafts in ours.

Two ways. `TokenSpelling` translates token by token, so what was written is never spelled anew; it keeps
to the target's boundaries between tokens. `TextSpelling` encodes the text as the draft model's own
tokenizer would: a few tokens before the end are encoded again whenever something is added, since the
boundary between tokens may move (universal assisted generation, as in transformers).

Neither has to be right: a draft that was made from an odd spelling is a worse guess, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from paceline.errors import RequestError
from paceline.text.pairing import Pairing
from paceline.text.tokenizer import Tokenizer

LOOK_BEHIND = 12
"""Tokens before the end that may be spelled anew."""


class Spelling(Protocol):
    """One request's text in the draft's ids.

    Attributes:
        ids: the draft's ids of all tokens followed so far; the caller only reads it.
        loose: how many of the last ids may still change.
    """

    ids: list[int]

    @property
    def loose(self) -> int: ...

    def follow(self, tokens: Iterable[int]) -> None:
        """Add the target's tokens."""
        ...


class Translator:
    """Spells a target's tokens with a draft's vocabulary and back.

    Args:
        target, draft: tokenizers.
        pairing: of the two.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, pairing: Pairing) -> None:
        self.target = target
        self.draft = draft
        self.pairing = pairing
        self.to_target: list[int] = pairing.to_target.tolist()
        self.to_draft: list[int] = pairing.to_draft.tolist()
        self.own_text = pairing.mode != "same"
        self._spelled: dict[int, list[int]] = {}
        self._bytes: dict[int, int] = {}
        for token in range(min(draft.vocab_size, len(self.to_target))):
            if token not in draft.special_ids and len(data := draft.token_bytes(token)) == 1:
                self._bytes[data[0]] = token

    def opening(self) -> list[int]:
        """What the draft expects before a text in its own spelling."""
        first = self.draft.bos_id if self.own_text and self.draft.add_bos else None
        return [first] if first is not None and first < len(self.to_target) else []

    def spell(self, token: int) -> list[int]:
        """The draft's ids for one of the target's tokens, without regard to its neighbours."""
        known = self.to_draft[token] if token < len(self.to_draft) else -1
        if known >= 0:
            return [known]
        ids = self._spelled.get(token)
        if ids is None:
            ids = self._spelled[token] = self._spell_new(token)
        return ids

    def encode(self, data: bytes) -> list[int]:
        """The draft's ids of text inside a text; bytes that are no text go one by one."""
        try:
            ids = self.draft.encode(data.decode(), add_special=False, continuing=True)
        except (UnicodeDecodeError, RequestError):
            return [self._bytes[byte] for byte in data if byte in self._bytes]
        return [token for token in ids if token < len(self.to_target)]

    def _spell_new(self, token: int) -> list[int]:
        if token >= self.target.vocab_size or token == self.target.bos_id:
            return []
        return self.encode(self.target.token_bytes(token))


class TokenSpelling:
    """Token by token."""

    loose = 0

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self.ids = translator.opening()

    def follow(self, tokens: Iterable[int]) -> None:
        spell = self._translator.spell
        for token in tokens:
            self.ids += spell(token)


class TextSpelling:
    """As the draft's tokenizer would spell the whole text, near enough."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self.ids = translator.opening()
        self._fixed = len(self.ids)  # so many are never spelled anew
        self._half = b""  # of a character

    @property
    def loose(self) -> int:
        return len(self.ids) - self._fixed

    def follow(self, tokens: Iterable[int]) -> None:
        target = self._translator.target
        data = b""
        for token in tokens:
            if token < target.vocab_size and not target.is_special(token):
                data += target.token_bytes(token)
                continue
            self._add(data)
            self._add_odd(self._translator.spell(token))
            data = b""
        self._add(data)

    def _add(self, data: bytes) -> None:
        data = self._half + data
        end = whole_characters(data)
        self._half = data[end:]
        if end == 0:
            return
        start = self._start()
        before = b"".join(map(self._translator.draft.token_bytes, self.ids[start:]))
        self.ids[start:] = self._translator.encode(before + data[:end])
        self._fixed = max(self._fixed, len(self.ids) - LOOK_BEHIND)

    def _add_odd(self, ids: Sequence[int]) -> None:
        self.ids += [*self._translator.encode(self._half), *ids]
        self._half = b""
        self._fixed = len(self.ids)

    def _start(self) -> int:
        """Where to begin anew: at a word's beginning if there is one, else at any whole character."""
        first = self._fixed
        spelled = [self._translator.draft.token_bytes(i) for i in self.ids[first:]]
        for offset, data in enumerate(spelled):
            if data[:1] in (b" ", b"\n"):
                return first + offset
        for offset, data in enumerate(spelled):
            if data and data[0] & 0xC0 != 0x80:
                return first + offset
        return len(self.ids)


def whole_characters(data: bytes) -> int:
    """Length of the longest front of `data` that does not end inside a UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(data) - back if back < length else len(data)
    return len(data)


def retell(translator: Translator, before: Sequence[int], drafted: Sequence[int]) -> list[tuple[int, int]]:
    """The target's tokens for what a draft model wrote.

    Args:
        before: the last of the target's committed tokens; some decide how the text goes on.
        drafted: the draft's ids that follow them.

    Returns:
        (token, n): a token of the target, and how many of `drafted` had been written when the first byte
        of the next one is reached. Stops before what cannot be told: control tokens that the target does
        not have, and unfinished characters.
    """
    data = b""
    ends: list[int] = []
    for n, token in enumerate(drafted, 1):
        if token in translator.draft.special_ids:
            known = translator.to_target[token]
            end = [(known, n)] if known >= 0 else []
            return _tokens(translator, before, data, ends) + end
        data += translator.draft.token_bytes(token)
        ends.append(len(data))
    return _tokens(translator, before, data, ends)


def _tokens(
    translator: Translator, before: Sequence[int], data: bytes, ends: Sequence[int]
) -> list[tuple[int, int]]:
    target = translator.target
    end = whole_characters(data)
    try:
        ids = _continued(target, before, data[:end].decode())
    except (UnicodeDecodeError, RequestError):
        return []
    told, at, n = [], 0, 0
    for token in ids:
        at += len(target.token_bytes(token))
        while n < len(ends) and (ends[n - 1] if n else 0) < at:
            n += 1
        told.append((token, n))
    return told


def _continued(target: Tokenizer, before: Sequence[int], text: str) -> list[int]:
    """Encode `text` so that it goes on after `before`, if the tokenizer can be brought to."""
    start = len(before)
    while start and len(before) - start < LOOK_BEHIND:
        start -= 1
        if before[start] >= target.vocab_size or target.is_special(before[start]):
            break
        data = b"".join(map(target.token_bytes, before[start:]))
        if data[:1] not in (b" ", b"\n"):
            continue
        try:
            ids = target.encode(data.decode() + text, add_special=False, continuing=True)
        except UnicodeDecodeError:
            continue
        tail = list(before[start:])
        return ids[len(tail) :] if ids[: len(tail)] == tail else _alone(target, text)
    return _alone(target, text)


def _alone(target: Tokenizer, text: str) -> list[int]:
    return target.encode(text, add_special=False, continuing=True)
