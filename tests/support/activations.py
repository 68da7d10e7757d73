"""How kernels round activations, redone in numpy: int8 with a power-of-two scale per group of 32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Floats
from paceline.weights.quants import TensorType

FLOATING = (TensorType.F32, TensorType.F16, TensorType.BF16)
"""Types whose products take activations as they are."""


def rounded(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return activations [..., width] as the integer kernels see them, exactly.

    A group's scale is the least power of two, from 2^-60 to 2^60, with max|x| <= 127 * scale.
    """
    groups: Floats = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    most = np.abs(groups).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    mantissa, exponent = np.frexp(most)
    exponent = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent), -60, 60)
    exponent[most == 0] = -60
    scale = np.ldexp(1.0, exponent)
    return np.asarray((np.rint(groups.astype(np.float64) / scale) * scale).reshape(x.shape), np.float64)
