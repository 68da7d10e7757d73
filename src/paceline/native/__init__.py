"""The compiled core: kernels, thread pool and recorded programs. Built from native/ by CMake."""

from __future__ import annotations

from paceline.native._core import Program, instruction_sets, packed_bytes, read_bandwidth, trim_memory

__all__ = ["Program", "instruction_sets", "packed_bytes", "read_bandwidth", "trim_memory"]
