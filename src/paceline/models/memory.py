"""Bytes that a network takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from paceline.models.config import DecoderConfig
from paceline.models.tally import Tally
from paceline.native import Program

PAGE_SIZE = 32
MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class CacheNeeds:
    """Bytes of a KV cache.

    Attributes:
        per_token: of one position in the layers that see everything.
        window: positions that a row sees in the others; 0 if there are none.
        window_per_token: of one position in these.
        rows: most rows of a pass.
    """

    per_token: int
    window: int = 0
    window_per_token: int = 0
    rows: int = MAX_ROWS

    @classmethod
    def of(cls, config: DecoderConfig, rows: int = MAX_ROWS) -> CacheNeeds:
        layer = 2 * config.kv_heads * config.head_dim * 2
        windowed = sum(window > 0 for window in config.windows)
        return cls((config.layers - windowed) * layer, max(config.windows), windowed * layer, rows)

    @property
    def window_tokens(self) -> int:
        """Positions that one sequence holds at most in layers with a window, a full pass included."""
        return self.window + PAGE_SIZE + self.rows

    def held(self, tokens: int, sequences: int = 1) -> int:
        """Bytes that sequences of so many tokens hold together. They share passes: its rows count once."""
        seen = min(tokens, self.window + PAGE_SIZE) * sequences + self.rows
        near = min(tokens * sequences, seen) * self.window_per_token
        return tokens * sequences * self.per_token + near

    def read(self, tokens: int) -> int:
        """Bytes that the row behind so many tokens reads."""
        return tokens * self.per_token + min(tokens, self.window) * self.window_per_token


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a network takes: its weights as they are packed, what a full pass works in, its cache."""

    weights: int
    workspace: int
    cache: CacheNeeds

    @classmethod
    def of(cls, program: Program, cache: CacheNeeds, besides: int = 0) -> MemoryNeeds:
        """What a tally says that took the place of a program.

        Args:
            besides: bytes of the network's own arrays.
        """
        tally = cast(Any, program)
        assert isinstance(tally, Tally), "only a tally counts"
        return cls(tally.matrices + tally.vectors, tally.workspace + besides, cache)
