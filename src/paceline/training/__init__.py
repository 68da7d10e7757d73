"""Fitting drafters to a target, on text that it wrote. Needs torch: `pip install "paceline[train]"`."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import UsageError


def need_torch() -> None:
    """Raise UsageError where torch is not installed; `transcripts` and `trial` do without it."""
    if find_spec("torch") is None:
        raise UsageError("fitting a head needs torch", 'pip install "paceline[train]"')
