"""What lies in a drafter's files: weights, tables of ids, settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Floats
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import Bytes, TensorType, dequantize
from paceline.weights.safetensors import SafetensorsFile

_FLOATS = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "u1", "U8": "u1"}

Indices = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Array:
    """A weight as it lies in the checkpoint.

    Attributes:
        read: returns its bytes.
        drop: lets the system drop the pages that reading brought in, where they are a file's.
    """

    type: TensorType
    shape: tuple[int, ...]
    read: Callable[[], Bytes]
    drop: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(math.prod(self.shape))

    def values(self, start: int = 0, end: int | None = None) -> Floats:
        """The rows from start to end, in float32."""
        raw = self.read().reshape(self.shape[0], -1)[start:end]
        return dequantize(self.type, np.ascontiguousarray(raw).reshape(-1), (len(raw), *self.shape[1:]))

    @classmethod
    def of(cls, values: Floats) -> Array:
        """An array that follows from something else."""
        raw = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
        return cls(TensorType.F32, values.shape, lambda: raw)


@dataclass(frozen=True, slots=True)
class Contents:
    """What files hold.

    Attributes:
        kind: of the drafter; "model" for a complete model, "" for what is not known.
        layout: whose way of writing it down; "" for what does not run.
        settings: config.json with nested parts flattened, or a GGUF file's keys without the architecture.
        arrays, indices: weights, and ids, by their names here.
        identity: differs between files of different content.
        interleaved: rows of query and key are in the order in which rope turns neighbours.
        unknown: names of weights that mean nothing here.
    """

    kind: str
    layout: str
    settings: dict[str, Any]
    arrays: dict[str, Array]
    indices: Indices
    identity: str
    interleaved: bool = False
    unknown: tuple[str, ...] = ()


def from_safetensors(shards: Sequence[SafetensorsFile]) -> tuple[dict[str, Array], Indices]:
    """Weights, and ids, of all files. What is neither is left to whoever needs it."""
    arrays: dict[str, Array] = {}
    indices: Indices = {}
    for shard in shards:
        for name, entry in shard.entries.items():
            if entry.dtype in _FLOATS and entry.shape and 0 not in entry.shape:
                arrays[name] = _array(shard, name, _FLOATS[entry.dtype], entry.shape)
            elif entry.dtype in _INTEGERS:
                raw = shard.data(name).view(_INTEGERS[entry.dtype]).astype(np.int64)
                indices[name] = raw.reshape(entry.shape)
    return arrays, indices


def from_gguf(file: GGUFFile) -> dict[str, Array]:
    """Weights of a GGUF file."""
    return {name: _array(file, name, info.type, info.shape) for name, info in file.tensors.items()}


def _array(file: SafetensorsFile | GGUFFile, name: str, kind: TensorType, shape: tuple[int, ...]) -> Array:
    return Array(kind, shape, lambda: file.data(name), lambda: file.release(name))
