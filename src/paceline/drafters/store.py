"""Responses of earlier requests: one bounded history that new requests may draft from."""

from __future__ import annotations

import json
import logging
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.drafters.shared_file import alone_in, write_atomically
from paceline.errors import ResourceError, UsageError
from paceline.native import ContextTree

_log = logging.getLogger("paceline")

SEPARATOR = -1
"""Stands between responses; no context reaches across it."""

_MAGIC = b"paceline responses 1\n"
_HEADER_LIMIT = 4096
_SAVE_EVERY_S = 2.0


class ResponseStore:
    """Token ids of past responses, oldest first, with a tree over them.

    When it outgrows `max_tokens` the older half is dropped and the tree built anew: a pause of about two
    microseconds per token kept, once per max_tokens / 2 tokens of responses.

    Args:
        max_tokens: bound on tokens kept; 0 keeps none.
        vocab_size: ids outside it are never taken from a file.
        identity: of model and tokenizer; ids mean nothing under another.
        file: where to keep it between runs. Written whole and atomically, readable by its owner only; what
            others wrote to it meanwhile, in this process or another, is kept.

    Raises:
        UsageError: the file is something else or belongs to another model, or its folder does not exist.
        ResourceError: the file cannot be read.
    """

    def __init__(
        self, max_tokens: int, *, vocab_size: int, identity: str, file: str | Path | None = None
    ) -> None:
        if max_tokens < 0:
            raise UsageError(f"max_tokens of suffix is {max_tokens}", "give 0 for none, or a positive number")
        self.max_tokens = max_tokens
        self._identity = identity
        self._vocab_size = vocab_size
        self._file = None if file is None else Path(file).expanduser()
        self._saved_at = -_SAVE_EVERY_S
        self._unsaved: list[int] = []
        if self._file is not None and not self._file.parent.is_dir():
            raise UsageError(
                f"{self._file.parent} is not a folder", f"create it, or keep {self._file.name} elsewhere"
            )
        self._build(self._load())

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, response: list[int]) -> None:
        if not response or self.max_tokens == 0:
            return
        tokens = self.tokens
        added = [*response[-self.max_tokens :], SEPARATOR]
        tokens += added
        if self._file is not None:
            self._unsaved = _newest(self._unsaved + added, self.max_tokens)
        if len(tokens) > self.max_tokens:
            self._build(_newest(tokens, max(self.max_tokens // 2, 1)))
        else:
            self.tree.follow(tokens)
        if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Add what is new to the file, if there is one; a full disk costs a log line, no more."""
        if self._file is None or not self._unsaved:
            return
        self._saved_at = time.monotonic()
        try:
            with alone_in(self._file.parent):
                tokens = _newest(self._load() + self._unsaved, self.max_tokens)
                body = np.asarray(tokens, "<i4").tobytes()
                header = _Header(self._identity, self._vocab_size, len(tokens), zlib.crc32(body))
                line = json.dumps(asdict(header)).encode() + b"\n"
                write_atomically(self._file, _MAGIC + line + body)
            self._unsaved.clear()
        except (OSError, UsageError, ResourceError) as error:
            _log.warning("could not save responses to %s (%s); going on without", self._file, error)

    def _build(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.tree = ContextTree()
        self.tree.follow(tokens)

    def _load(self) -> list[int]:
        if self._file is None or self.max_tokens == 0:
            return []
        try:
            with self._file.open("rb") as stream:
                if (magic := stream.read(len(_MAGIC))) == b"":
                    return []
                if magic != _MAGIC:
                    raise UsageError(
                        f"{self._file} is not a file of responses",
                        "give another name; this file is left as it is",
                    )
                header = _Header.parse(stream.readline(_HEADER_LIMIT))
                body = stream.read(4 * header.tokens + 1) if header else b""
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ResourceError(
                f"cannot read {self._file}: {error.strerror}", "check its permissions, or leave out file="
            ) from None
        if header and (header.identity, header.vocab_size) != (self._identity, self._vocab_size):
            raise UsageError(
                f"{self._file} holds responses of another model: {header.identity!r}, not {self._identity!r}",
                "give each model a file of its own",
            )
        tokens = header.decode(body) if header else None
        if tokens is None:
            _log.warning("%s is damaged; starting without earlier responses", self._file)
            return []
        return _newest(tokens, self.max_tokens)


@dataclass(frozen=True, slots=True)
class _Header:
    """One line of JSON before the ids, which are little-endian int32."""

    identity: str
    vocab_size: int
    tokens: int
    crc32: int

    @classmethod
    def parse(cls, line: bytes) -> _Header | None:
        """Return None for a damaged line."""
        try:
            header = cls(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            return None
        numbers = (header.vocab_size, header.tokens, header.crc32)
        sound = isinstance(header.identity, str) and all(type(n) is int and 0 <= n < 1 << 32 for n in numbers)
        return header if sound else None

    def decode(self, body: bytes) -> list[int] | None:
        """Return the ids, or None if they are not the ones that were written."""
        if len(body) != 4 * self.tokens or zlib.crc32(body) != self.crc32:
            return None
        ids = np.frombuffer(body, "<i4")
        if len(ids) and (ids.min() < SEPARATOR or ids.max() >= self.vocab_size):
            return None
        return list(ids.tolist())


def _newest(tokens: list[int], limit: int) -> list[int]:
    """The newest whole responses within `limit` tokens, or the end of the last one if it alone is longer."""
    if len(tokens) <= limit:
        return tokens
    kept = tokens[-limit:]
    start = kept.index(SEPARATOR) + 1 if SEPARATOR in kept[:-1] else 0
    return kept[start:]
