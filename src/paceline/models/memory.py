"""Bytes that a model takes, told from its header."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.models.config import DecoderConfig
from paceline.native import packed_bytes
from paceline.weights.source import Source

PAGE_SIZE = 32
MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class CacheNeeds:
    """Bytes of a KV cache.

    Attributes:
        per_token: of one position in the layers that see everything.
        window: positions that a row sees in the others; 0 if there are none.
        window_per_token: of one position in these.
    """

    per_token: int
    window: int = 0
    window_per_token: int = 0

    @classmethod
    def of(cls, config: DecoderConfig) -> CacheNeeds:
        layer = 2 * config.kv_heads * config.head_dim * 2
        windowed = sum(window > 0 for window in config.windows)
        return cls((config.layers - windowed) * layer, max(config.windows), windowed * layer)

    @property
    def window_tokens(self) -> int:
        """Positions that one sequence holds at most in layers with a window, a full pass included."""
        return self.window + PAGE_SIZE + MAX_ROWS

    def held(self, tokens: int, sequences: int = 1) -> int:
        """Bytes that sequences of so many tokens hold together. They share passes: its rows count once."""
        seen = min(tokens, self.window + PAGE_SIZE) * sequences + MAX_ROWS
        near = min(tokens * sequences, seen) * self.window_per_token
        return tokens * sequences * self.per_token + near

    def read(self, tokens: int) -> int:
        """Bytes that the row behind so many tokens reads."""
        return tokens * self.per_token + min(tokens, self.window) * self.window_per_token


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a model takes: its weights as they are packed, what a full pass works in, its cache."""

    weights: int
    workspace: int
    cache: CacheNeeds


def memory_needs(file: Source, config: DecoderConfig) -> MemoryNeeds:
    """Tell from a header what a model takes. An embedding with a head of its own stays in the mapped file."""
    weights = 0
    for info in file.tensors.values():
        if info.name == "token_embd.weight" and "output.weight" in file.tensors:
            continue
        *rows, cols = info.shape
        matrix = rows and cols % 32 == 0
        weights += packed_bytes(int(info.type), math.prod(rows), cols) if matrix else info.nbytes
    inner, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    workspace = MAX_ROWS * 4 * (2 * config.width + 3 * inner + 2 * kv_width + config.hidden)
    if config.experts is not None:
        workspace += MAX_ROWS * config.experts.used * (6 * config.width + 2 * config.experts.hidden)
    return MemoryNeeds(weights, workspace, CacheNeeds.of(config))
