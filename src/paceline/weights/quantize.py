"""Rounding weights to 8 or 4 bits while a model loads: symmetric, in groups of 32 along a row.

`q8` rounds to nearest; the largest value of a group sets its scale. `q4` has sixteen levels, -8 to 7 times a
scale. Of several first guesses it keeps the one whose least-squares scale leaves the smallest squared error,
and rounds once more to that scale. Neither needs calibration data. The results are ggml's Q8_0 and Q4_0
blocks, so they run as those do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paceline.core import Floats
from paceline.errors import ModelFileError, UsageError, suggest
from paceline.weights.quants import BLOCK_LAYOUT, Blocks, Bytes, TensorType

METHODS = {"q8": TensorType.Q8_0, "q4": TensorType.Q4_0}
"""By the name that users give."""

_GROUP = 32
_CHUNK_ELEMENTS = 1 << 16  # what a thread works on stays in its cache
_GUESSES = np.linspace(-8.8, -6.4, 9, dtype=np.float32)
"""Levels that the largest value of a group is tried at; half a level beyond -8 clips it."""


def check_method(method: str | None) -> None:
    """Raise UsageError unless this names a way to quantise, or is None."""
    if method is not None and method not in METHODS:
        raise UsageError(f"quantize is {method!r}", suggest(str(method), list(METHODS)))


def quantize(name: str, rows: int, cols: int, read: Callable[[int, int], Floats], kind: TensorType) -> Bytes:
    """Quantise a matrix.

    Args:
        name: for errors.
        cols: a multiple of 32.
        read: returns rows [start, end) as [end - start, cols].

    Returns:
        The blocks, row after row, as bytes.

    Raises:
        ModelFileError: a value is not finite, or too large for a scale in half precision.
    """
    out = np.empty(rows * cols // _GROUP, BLOCK_LAYOUT[kind])
    blocks = out.reshape(rows, -1)
    encode = _ENCODE[kind]
    step = max(1, _CHUNK_ELEMENTS // cols)

    def work(start: int) -> None:
        groups = read(start, min(start + step, rows)).reshape(-1, _GROUP)
        part = blocks[start : start + step].reshape(-1)
        with np.errstate(all="ignore"):  # zeros divide; what is not finite is refused below
            encode(groups, part)
        if not np.isfinite(part["d"]).all():
            raise ModelFileError(
                f"{name}: weights that are infinite, not a number, or beyond half precision",
                "the folder is damaged; download it again",
            )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(work, range(0, rows, step)):
            pass
    return out.view(np.uint8).reshape(-1)


def _q8_0(groups: Floats, out: Blocks) -> None:
    scale = (np.abs(groups).max(axis=1) / np.float32(127)).astype(np.float16)
    out["d"] = scale
    levels = groups * _inverse(scale.astype(np.float32))[:, None]
    out["qs"] = np.clip(np.rint(levels), -127, 127)


def _q4_0(groups: Floats, out: Blocks) -> None:
    at = np.abs(groups).argmax(axis=1)
    peak = np.take_along_axis(groups, at[:, None], axis=1)[:, 0]
    best = np.zeros(len(groups), np.float32)
    scale = np.zeros(len(groups), np.float32)
    inverse, levels = _inverse(peak), np.empty_like(groups)
    for guess in _GUESSES:
        _levels(groups, guess * inverse, levels)
        product, norm = np.vecdot(groups, levels), np.vecdot(levels, levels)
        # With the best scale, product / norm, the squared error is that of zeros less this.
        gain = product * product * _inverse(norm)
        better = gain > best
        np.copyto(best, gain, where=better)
        np.copyto(scale, product * _inverse(norm), where=better)
    # What is no number loses every comparison above; it must reach the scale to be noticed.
    rounded = (scale + np.float32(0) * peak).astype(np.float16)
    out["d"] = rounded
    _levels(groups, _inverse(rounded.astype(np.float32)), levels)
    codes = (levels + 8).astype(np.uint8)
    out["qs"] = codes[:, :16] | (codes[:, 16:] << np.uint8(4))


def _levels(groups: Floats, inverse: Floats, out: Floats) -> None:
    np.multiply(groups, inverse[:, None], out=out)
    np.rint(out, out=out)
    np.clip(out, -8, 7, out=out)


def _inverse(values: Floats) -> Floats:
    """1 / values, and 0 for 0."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=values != 0)


_ENCODE: dict[TensorType, Callable[[Floats, Blocks], None]] = {
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
}
