"""Architectures by the name a file gives: one row and one module each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from paceline.errors import UnsupportedModelError, suggest
from paceline.models.config import DecoderConfig
from paceline.models.tensors import Tensors
from paceline.native import Program

Record = Callable[[Program, Tensors, DecoderConfig, int], None]

ARCHITECTURES = {
    "llama": "paceline.models.llama",
    "qwen2": "paceline.models.qwen2",
}


def recorder(architecture: str) -> Record:
    """Return the function that records this architecture."""
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} does not run here", suggest(architecture, list(ARCHITECTURES))
        )
    return cast(Record, import_module(ARCHITECTURES[architecture]).record)
