"""Architectures by the name a file gives: one row and one module each."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from paceline.errors import UnsupportedModelError, suggest
from paceline.models.architecture import Architecture

ARCHITECTURES = {
    "gemma2": "paceline.models.gemma2",
    "gemma3": "paceline.models.gemma3",
    "llama": "paceline.models.llama",
    "phi3": "paceline.models.phi3",
    "qwen2": "paceline.models.qwen2",
    "qwen3": "paceline.models.qwen3",
    "qwen3moe": "paceline.models.qwen3moe",
}


def architecture(name: str) -> Architecture:
    """Return what is special about this architecture."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {name!r} does not run here", suggest(name, list(ARCHITECTURES))
        )
    return cast(Architecture, import_module(ARCHITECTURES[name]).ARCHITECTURE)
