"""What drafters learnt about their chances, kept between runs: one bounded file for all targets and drafters.

A fresh drafter knows nothing of how often its guesses come true and has to find out at the first texts'
expense. What an earlier run found counts for it as a limited number of guesses, so that other texts soon
count more. The file is no more than a hint: one that is damaged, old or hostile is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core import is_whole
from paceline.drafters.calibration import Calibration
from paceline.drafters.shared_file import alone_in, write_atomically
from paceline.errors import ResourceError
from paceline.weights import hub

_log = logging.getLogger("paceline")

FORMAT = 1
MOST_ENTRIES = 64
"""Pairs of target and drafter; the one not used for longest is dropped."""

MOST_BYTES = 1 << 20
WORTH = 120
"""Guesses, at most, that what was kept counts for."""

_MOST_WEIGHTS = 256
_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a drafter knows of its guesses.

    Attributes:
        weights: log-odds of its calibration.
        seen: guesses that each comes from.
        hope: average chance of its first guesses.
        hoped: guesses that it comes from.
    """

    weights: list[float]
    seen: list[int]
    hope: float
    hoped: int

    @classmethod
    def parse(cls, value: object) -> Learnt | None:
        """Make sense of what a file holds; None if it has none."""
        if not isinstance(value, dict) or set(value) != {"weights", "seen", "hope", "hoped"}:
            return None
        weights, seen = value["weights"], value["seen"]
        sound = (
            isinstance(weights, list)
            and isinstance(seen, list)
            and 0 < len(weights) == len(seen) <= _MOST_WEIGHTS
            and all(_is_number(weight, -_LIMIT, _LIMIT) for weight in weights)
            and all(is_whole(count) and 0 <= count < 1 << 31 for count in [*seen, value["hoped"]])
            and _is_number(value["hope"], 0.0, 1.0)
        )
        return cls(list(map(float, weights)), seen, float(value["hope"]), value["hoped"]) if sound else None


class Memory:
    """The part of the file that belongs to one drafter and its target.

    Args:
        file: of all of them; its folder is made when something is kept.
        key: of target and drafter, both by content.
    """

    def __init__(self, file: Path, key: str) -> None:
        self.file = file
        self.key = key

    def recall(self, size: int) -> Learnt | None:
        """What was kept of a calibration with so many weights."""
        found = Learnt.parse(self._entries(note=True).get(self.key))
        if found is None or len(found.weights) != size:
            return None
        return Learnt(found.weights, [min(n, WORTH) for n in found.seen], found.hope, min(found.hoped, WORTH))

    def keep(self, learnt: Learnt) -> None:
        """Write it down; where that cannot be done, drafting loses nothing but this knowledge."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with alone_in(self.file.parent):
                entries = self._entries()
                entries.pop(self.key, None)
                entries[self.key] = asdict(learnt)
                kept = dict(list(entries.items())[-MOST_ENTRIES:])
                text = json.dumps({"format": FORMAT, "entries": kept}, separators=(",", ":"))
                write_atomically(self.file, text.encode())
        except OSError as error:
            _log.info("chances of drafters could not be kept in %s: %s", self.file, error.strerror)

    def _entries(self, *, note: bool = False) -> dict[str, Any]:
        """All that the file holds, the latest last; nothing if it makes no sense."""
        try:
            if not stat.S_ISREG(self.file.stat().st_mode):
                raise ValueError("it is no regular file")
            with self.file.open("rb") as stream:
                raw = stream.read(MOST_BYTES + 1)
            if len(raw) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            value = json.loads(raw)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise ValueError("another version wrote it")
            if not isinstance(entries := value.get("entries"), dict):
                raise ValueError("it has no entries")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            if note:
                _log.warning("%s is ignored: %s; chances are learnt anew", self.file, error)
            return {}
        return {key: entry for key, entry in entries.items() if Learnt.parse(entry) is not None}


class Remembering:
    """Base of drafters that keep what they learn; `remember` says where, and `close` writes it down."""

    calibration: Calibration
    _memory: Memory | None = None

    def remember(self, memory: Memory) -> None:
        """Go on from what an earlier run learnt, and keep what is learnt from now on."""
        self._memory = memory
        if (learnt := memory.recall(len(self.calibration.weights))) is not None:
            self.calibration.resume(learnt.weights, learnt.seen)
            self._resume_hope(learnt.hope, learnt.hoped)

    def close(self) -> None:
        """Write down what was learnt since the last time."""
        if self._memory is not None and self.calibration.judged:
            self.calibration.judged = 0
            self._memory.keep(Learnt(self.calibration.weights, self.calibration.seen, *self._hope_so_far()))

    def _resume_hope(self, hope: float, hoped: int) -> None:
        raise NotImplementedError

    def _hope_so_far(self) -> tuple[float, int]:
        raise NotImplementedError


def default_file() -> Path | None:
    """Where chances are kept; None where the user has no cache."""
    try:
        return hub.cache_dir() / "chances.json"
    except ResourceError:
        return None


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def key_of(*parts: object) -> str:
    """One name for all that a drafter's chances depend on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
