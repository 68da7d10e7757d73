"""How kernels round activations, redone in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Floats
from paceline.weights.quants import TensorType

FLOATING = (TensorType.F32, TensorType.F16, TensorType.BF16)
"""Types whose products are sums of single products, not of groups."""

LEAST_BF16 = 2.0**-56
"""Products with bf16 weights treat smaller weights and activations as zero."""


def seen_by(kind: TensorType, x: NDArray[Any]) -> NDArray[np.float64]:
    """Return activations [..., width] as products with weights of this kind see them, exactly."""
    if kind == TensorType.BF16:
        return rounded_to_bf16(x)
    return x.astype(np.float64) if kind in FLOATING else rounded(x)


def rounded_to_bf16(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return float32 activations to the nearest bf16, ties to even; zero below LEAST_BF16."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    nearest = np.ldexp(np.rint(mantissa * 256), exponent - 8)
    return np.where(np.abs(x) < LEAST_BF16, 0.0, nearest)


def rounded(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return activations [..., width] as the integer kernels see them, exactly: int8 times a scale per 32.

    A group's largest value becomes 127; groups of values below 2^-60 are zero.
    """
    groups: Floats = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    most = np.abs(groups).max(axis=-1, keepdims=True)
    most[most < 2.0**-60] = np.inf
    quants = np.rint(groups * (np.float32(127) / most))
    scale = np.where(most < np.inf, most / np.float32(127), 0)
    return np.asarray((quants.astype(np.float64) * scale).reshape(x.shape), np.float64)
