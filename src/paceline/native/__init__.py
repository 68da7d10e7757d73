"""The compiled core, from native/: kernels, thread pool, recorded programs; the suffix drafter's index."""

from __future__ import annotations

from paceline.native._core import (
    ContextTree,
    Program,
    SuffixOffer,
    instruction_sets,
    packed_bytes,
    read_bandwidth,
    suffix_offer,
    trim_memory,
)

__all__ = [
    "ContextTree",
    "Program",
    "SuffixOffer",
    "instruction_sets",
    "packed_bytes",
    "read_bandwidth",
    "suffix_offer",
    "trim_memory",
]
