"""Speculative decoding on the CPU: faster text from a real model, byte for byte the same."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core import SamplingParams
    from paceline.engine import LLM
    from paceline.errors import PacelineError, RequestError, UsageError

__all__ = ["LLM", "PacelineError", "RequestError", "SamplingParams", "UsageError"]

# Loaded when asked for, so that `paceline --help` does not wait for numpy.
_HOME = {"LLM": "paceline.engine", "SamplingParams": "paceline.core"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "paceline.errors")), name)
