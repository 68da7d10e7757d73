"""Writes GGUF files for tests: tiny random models, and headers to be damaged."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.weights.quants import BLOCK_LAYOUT, TensorType

_SCALAR_IDS = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}
_STRING, _ARRAY = 8, 9

_UNIT_SCALES: dict[TensorType, dict[str, float]] = {
    TensorType.Q4_0: {"d": 1 / 8},
    TensorType.Q4_1: {"d": 2 / 15, "m": -1},
    TensorType.Q5_0: {"d": 1 / 16},
    TensorType.Q5_1: {"d": 2 / 31, "m": -1},
    TensorType.Q8_0: {"d": 1 / 127},
    TensorType.Q2_K: {"d": 1 / 22, "dmin": 1 / 15},
    TensorType.Q3_K: {"d": 1 / (32 * 4)},
    TensorType.Q4_K: {"d": 1 / (63 * 7.5), "dmin": 1 / 63},
    TensorType.Q5_K: {"d": 1 / (63 * 15.5), "dmin": 1 / 63},
    TensorType.Q6_K: {"d": 1 / (128 * 32)},
    TensorType.IQ4_NL: {"d": 1 / 127},
    TensorType.IQ4_XS: {"d": 1 / (32 * 127)},
}
"""Block scales that make random fields mean values of about -1 to 1."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it lies in the file; shape in numpy order."""

    type: int
    shape: tuple[int, ...]
    raw: bytes

    @classmethod
    def of(cls, values: NDArray[Any], kind: TensorType = TensorType.F32) -> Tensor:
        """Store float values as F32, F16 or BF16 (truncated)."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        if kind is TensorType.BF16:
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            raw = values.astype({TensorType.F32: np.float32, TensorType.F16: np.float16}[kind]).tobytes()
        return cls(kind, values.shape, raw)

    @classmethod
    def ids(cls, values: NDArray[Any]) -> Tensor:
        """Store 64-bit integers."""
        return cls(27, values.shape, values.astype("<i8").tobytes())

    @classmethod
    def random(
        cls, kind: TensorType, shape: tuple[int, ...], rng: np.random.Generator, *, scale: float = 1.0
    ) -> Tensor:
        """Draw a tensor of any type, with every field of every block random, values within about ±scale."""
        if kind not in _UNIT_SCALES:
            return cls.of(rng.uniform(-scale, scale, shape), kind)
        raw = rng.integers(0, 256, kind.nbytes(math.prod(shape)), dtype=np.uint8)
        blocks = raw.view(BLOCK_LAYOUT[kind])
        for field, unit in _UNIT_SCALES[kind].items():
            blocks[field] = unit * scale * rng.uniform(0.5, 1.0, len(blocks))
        return cls(kind, shape, raw.tobytes())


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a GGUF v3 file and return its path; see `gguf_bytes`."""
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 3, alignment: int = 32
) -> bytes:
    """Return a GGUF file.

    Python values take GGUF's customary types: bool, uint32 (int32 when negative, else 64 bits), float32,
    string; lists become arrays, of int32 for ints. A numpy scalar or array keeps its own type.
    `general.alignment` is written when `alignment` is not the default.
    """
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        kind, raw = _value(value)
        out += _string(key) + struct.pack("<I", kind) + raw
    offset = 0
    for name, tensor in tensors.items():
        dimensions = tensor.shape[::-1]
        out += _string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        out += struct.pack("<IQ", tensor.type, offset)
        offset += _aligned(len(tensor.raw), alignment)
    for tensor in tensors.values():
        out += bytes(_aligned(len(out), alignment) - len(out)) + tensor.raw
    return bytes(out)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return _STRING, _string(value)
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        parts = [_value(item) for item in value]
        assert len({kind for kind, _ in parts}) == 1
        return _ARRAY, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(raw for _, raw in parts)
    array = _as_numpy(value)
    kind = _SCALAR_IDS[array.dtype.str[1:]]
    if array.ndim == 0:
        return kind, array.tobytes()
    return _ARRAY, struct.pack("<IQ", kind, len(array)) + array.tobytes()


def _as_numpy(value: Any) -> NDArray[Any]:
    if isinstance(value, np.generic | np.ndarray):
        return np.asarray(value)
    if isinstance(value, bool):
        return np.asarray(value)
    if isinstance(value, int):
        wide = np.int64 if value < 0 else np.uint64
        narrow = np.int32 if value < 0 else np.uint32
        return np.asarray(value, narrow if np.iinfo(narrow).min <= value <= np.iinfo(narrow).max else wide)
    if isinstance(value, float):
        return np.asarray(value, np.float32)
    first = value[0] if value else 0
    return np.asarray(
        value, np.bool_ if isinstance(first, bool) else np.int32 if isinstance(first, int) else np.float32
    )


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""What GGUF files call the parts of a layer that folders of safetensors name like this."""
