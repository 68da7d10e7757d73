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

    A group's scale is the least power of two, from 2^-60 to 2^60, with max|x| <= 127 * scale.
    """
    groups: Floats = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    most = np.abs(groups).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    mantissa, exponent = np.frexp(most)
    exponent = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent), -60, 60)
    exponent[most == 0] = -60
    scale = np.ldexp(1.0, exponent)
    return np.asarray((np.rint(groups.astype(np.float64) / scale) * scale).reshape(x.shape), np.float64)
