"""What the bytes of a tensor mean: ggml's block formats and their exact values in float32.

The layouts are ggml's, field by field. `dequantize` is the reference that kernels are tested against;
it is written to be read, and to round exactly where ggml rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Blocks = NDArray[Any]  # structured, one element per block

_CHUNK_ELEMENTS = 1 << 20  # temporaries of one dequantize step stay within a few MiB


class TensorType(IntEnum):
    """The tensor types Paceline reads, with ggml's ids."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30

    @property
    def block_size(self) -> int:
        """Elements per block; rows are whole blocks."""
        return _BLOCK_SIZE[self]

    @property
    def type_size(self) -> int:
        """Bytes per block."""
        return BLOCK_LAYOUT[self].itemsize

    def nbytes(self, elements: int) -> int:
        """Bytes that `elements`, a multiple of the block size, take."""
        return elements // self.block_size * self.type_size


UNSUPPORTED_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""ggml types that are known by name only, so that they can be refused by name."""

BLOCK_LAYOUT: dict[TensorType, np.dtype[Any]] = {
    TensorType.F32: np.dtype([("x", "<f4")]),
    TensorType.F16: np.dtype([("x", "<f2")]),
    TensorType.BF16: np.dtype([("x", "<u2")]),
    TensorType.Q4_0: np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    TensorType.Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    TensorType.Q5_0: np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    TensorType.Q5_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    TensorType.Q8_0: np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    TensorType.Q2_K: np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
    TensorType.Q3_K: np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    TensorType.Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    TensorType.Q5_K: np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    ),
    TensorType.Q6_K: np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
    TensorType.IQ4_NL: np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    TensorType.IQ4_XS: np.dtype([("d", "<f2"), ("high", "u1", 2), ("low", "u1", 4), ("qs", "u1", 128)]),
}
"""The fields of one block of each type, in file order."""

_BLOCK_SIZE: dict[TensorType, int] = {
    kind: 1 if "x" in (layout.names or ()) else 256 if kind.name.endswith(("_K", "_XS")) else 32
    for kind, layout in BLOCK_LAYOUT.items()
}

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
"""The sixteen levels of IQ4_NL and IQ4_XS, in units of the block's scale."""


def dequantize(kind: TensorType, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """Widen a tensor to float32, exactly as ggml defines its values.

    Args:
        raw: the tensor's bytes, contiguous, `kind.nbytes(prod(shape))` of them.
        shape: numpy order, the last axis a multiple of the block size.
    """
    elements = math.prod(shape)
    assert raw.size == kind.nbytes(elements)
    assert not shape or shape[-1] % kind.block_size == 0
    blocks = raw.view(BLOCK_LAYOUT[kind])
    out = np.empty((blocks.size, kind.block_size), dtype=np.float32)
    step = _CHUNK_ELEMENTS // kind.block_size
    with np.errstate(all="ignore"):  # scales may be inf or nan; they pass through
        for start in range(0, blocks.size, step):
            out[start : start + step] = _WIDEN[kind](blocks[start : start + step])
    return out.reshape(shape)


def _fields(packed: Bytes, width: int, run: int) -> Bytes:
    """Unpack unsigned fields of `width` bits, each run of bytes from its low bits to its high bits.

    ggml packs every format this way: element i of a run lies in the low bits of byte i, element
    run + i in the next bits of the same byte.

    Args:
        packed: [blocks, bytes].

    Returns:
        [blocks, bytes * 8 / width].
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _centred(fields: Bytes, offset: int) -> NDArray[np.int8]:
    return fields.astype(np.int8) - np.int8(offset)


def _float(blocks: Blocks, name: str) -> Floats:
    """Return a float16 field as [blocks, 1] float32."""
    column: Floats = blocks[name].astype(np.float32)[:, None]
    return column


def _scaled(scales: Floats, values: NDArray[Any], minimum: Floats | None = None) -> Floats:
    """Multiply values [blocks, elements] by per-group scales [blocks, groups]; subtract per-group minima."""
    groups = values.reshape(*scales.shape, -1).astype(np.float32)
    product: Floats = scales[..., None] * groups
    if minimum is not None:
        product -= minimum[..., None]
    return product.reshape(values.shape)


def _f32(b: Blocks) -> Floats:
    return _float(b, "x")


def _bf16(b: Blocks) -> Floats:
    return (b["x"].astype(np.uint32) << 16).view(np.float32)[:, None]


def _q4_0(b: Blocks) -> Floats:
    return _scaled(_float(b, "d"), _centred(_fields(b["qs"], 4, 16), 8))


def _q4_1(b: Blocks) -> Floats:
    return _scaled(_float(b, "d"), _fields(b["qs"], 4, 16)) + _float(b, "m")


def _five_bits(b: Blocks) -> Bytes:
    return _fields(b["qs"], 4, 16) | (_fields(b["qh"], 1, 1) << np.uint8(4))


def _q5_0(b: Blocks) -> Floats:
    return _scaled(_float(b, "d"), _centred(_five_bits(b), 16))


def _q5_1(b: Blocks) -> Floats:
    return _scaled(_float(b, "d"), _five_bits(b)) + _float(b, "m")


def _q8_0(b: Blocks) -> Floats:
    return _scaled(_float(b, "d"), b["qs"])


def _q2_k(b: Blocks) -> Floats:
    scales = _float(b, "d") * (b["scales"] & np.uint8(15)).astype(np.float32)
    minima = _float(b, "dmin") * (b["scales"] >> np.uint8(4)).astype(np.float32)
    return _scaled(scales, _fields(b["qs"], 2, 32), minima)


def _q3_k(b: Blocks) -> Floats:
    low, high = _fields(b["scales"][:, :8], 4, 8), _fields(b["scales"][:, 8:], 2, 4)
    scales = _centred(low | (high << np.uint8(4)), 32)
    # The high bit is stored inverted: a set mask bit means that 4 is not subtracted.
    values = _centred(_fields(b["qs"], 2, 32) | (_fields(b["hmask"], 1, 32) << np.uint8(2)), 4)
    return _scaled(_float(b, "d") * scales.astype(np.float32), values)


def _six_bit_scales(b: Blocks) -> tuple[Floats, Floats]:
    """Return the scales and minima [blocks, 8] that Q4_K and Q5_K pack into 12 bytes."""
    first, second, rest = (b["scales"][:, i : i + 4] for i in (0, 4, 8))
    top = np.uint8(0x30)
    scales = np.hstack([first & np.uint8(63), (rest & np.uint8(15)) | ((first >> np.uint8(2)) & top)])
    minima = np.hstack([second & np.uint8(63), (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & top)])
    return _float(b, "d") * scales.astype(np.float32), _float(b, "dmin") * minima.astype(np.float32)


def _q4_k(b: Blocks) -> Floats:
    scales, minima = _six_bit_scales(b)
    return _scaled(scales, _fields(b["qs"], 4, 32), minima)


def _q5_k(b: Blocks) -> Floats:
    scales, minima = _six_bit_scales(b)
    return _scaled(scales, _fields(b["qs"], 4, 32) | (_fields(b["qh"], 1, 32) << np.uint8(4)), minima)


def _q6_k(b: Blocks) -> Floats:
    values = _centred(_fields(b["ql"], 4, 64) | (_fields(b["qh"], 2, 32) << np.uint8(4)), 32)
    return _scaled(_float(b, "d") * b["scales"].astype(np.float32), values)


def _iq4_nl(b: Blocks) -> Floats:
    return _scaled(_float(b, "d"), IQ4_VALUES[_fields(b["qs"], 4, 16)])


def _iq4_xs(b: Blocks) -> Floats:
    scales = _centred(_fields(b["low"], 4, 1) | (_fields(b["high"], 2, 1) << np.uint8(4)), 32)
    return _scaled(_float(b, "d") * scales.astype(np.float32), IQ4_VALUES[_fields(b["qs"], 4, 16)])


_WIDEN: dict[TensorType, Callable[[Blocks], Floats]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f32,
    TensorType.BF16: _bf16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.IQ4_XS: _iq4_xs,
}
