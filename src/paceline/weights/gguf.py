"""GGUF files: metadata and tensors over a read-only memory map.

A model file is hostile input. Every count, length and offset is held against what is left of the file
before anything is allocated, so a damaged file costs one error and little memory. Versions 2 and 3 of
the little-endian format are read; everything else is refused by name.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError
from paceline.weights.mapping import DAMAGED, TensorInfo, drop_pages, map_file
from paceline.weights.quants import UNSUPPORTED_NAMES, Bytes, TensorType

MAX_HEADER_BYTES = 128 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_ELEMENTS = 1 << 22  # over all arrays of a file; the largest vocabularies need about a third
MAX_NAME_CHARACTERS = 256
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_LEAST_BYTES = {kind: dtype.itemsize for kind, dtype in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}
_LEAST_KEY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_OTHER_FORMATS = {
    b"FUGG": "a big-endian GGUF file",
    b"lmgg": "a GGML file, older than GGUF",
    b"tjgg": "a GGJT file, older than GGUF",
    b"fmgg": "a GGMF file, older than GGUF",
    b"PK\x03\x04": "a zip archive or PyTorch checkpoint",
    b"vers": "a git-lfs pointer, not the model itself; run `git lfs pull`",
    b"<!DO": "a web page; the download link was wrong or needs a login",
    b"<htm": "a web page; the download link was wrong or needs a login",
}


class GGUFFile:
    """An open GGUF file; also a context manager.

    Attributes:
        metadata: key to value; strings as str, numbers as int or float, arrays as (nested) lists.
        tensors: name to place, in file order.
    """

    def __init__(
        self,
        path: Path,
        memory: mmap.mmap,
        metadata: dict[str, Any],
        tensors: dict[str, TensorInfo],
        indices: dict[str, TensorInfo],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._indices = indices
        self._memory: mmap.mmap | None = memory

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, indices: bool = False) -> GGUFFile:
        """Map a file and read its header.

        Args:
            indices: allow tensors of 64-bit integers, which `indices` returns; no weights are such.

        Raises:
            ModelFileError: the file cannot be read, is no GGUF file, or is damaged.
            UnsupportedModelError: sound, but of a version, layout or tensor type that is not read here.
        """
        path = Path(path)
        memory = map_file(path, ".gguf")
        reader = _Reader(path, memory, indices)
        metadata, tensors = reader.header()
        wide = {name: tensors.pop(name) for name in reader.indices}
        return cls(path, memory, metadata, tensors, wide)

    def indices(self) -> dict[str, NDArray[np.int64]]:
        """The tensors of 64-bit integers."""
        assert self._memory is not None
        return {
            name: np.frombuffer(self._memory, "<i8", math.prod(info.shape), info.offset).reshape(info.shape)
            for name, info in self._indices.items()
        }

    def data(self, name: str) -> Bytes:
        """Return a tensor's bytes [nbytes], a read-only view that stays valid after `close`."""
        assert self._memory is not None
        info = self.tensors[name]
        return np.frombuffer(self._memory, np.uint8, info.nbytes, info.offset)

    def release(self, name: str) -> None:
        """Let the system drop a tensor's pages; `data` brings them back. Whole pages only."""
        info = self.tensors[name]
        if self._memory is not None:
            drop_pages(self._memory, info.offset, info.nbytes)

    def forget_arrays(self) -> None:
        """Drop metadata arrays: the vocabulary's are large, and a tokenizer that was built holds its own."""
        for key in [key for key, value in self.metadata.items() if isinstance(value, list)]:
            del self.metadata[key]

    def identity(self) -> str:
        """Name the file by its header and size, without reading all of it."""
        with self.path.open("rb") as file:
            head = file.read(1 << 20)
        return hashlib.sha256(head + str(self.path.stat().st_size).encode()).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def close(self) -> None:
        """Give the map back as soon as the last view of it is gone."""
        self._memory = None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, memory: mmap.mmap, allow_indices: bool) -> None:
        self.path = path
        self.memory = memory
        self.allow_indices = allow_indices
        self.indices: list[str] = []
        self.at = 0
        self.size = len(memory)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.elements_left = MAX_ARRAY_ELEMENTS

    def header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """Read the whole header: metadata, then tensor places."""
        self.check_magic_and_version()
        tensor_count = self.count("tensors", _LEAST_TENSOR_BYTES, MAX_TENSORS)
        key_count = self.count("metadata keys", _LEAST_KEY_BYTES, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.name("metadata key")
            if key in metadata:
                self.damaged(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(key, self.number("<I"), 0)
        self.refuse_split(metadata)
        alignment = self.alignment(metadata)
        tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            info = self.tensor(alignment)
            if info.name in tensors:
                self.damaged(f"tensor {info.name!r} occurs twice")
            tensors[info.name] = info
        return metadata, self.placed(tensors, alignment)

    def check_magic_and_version(self) -> None:
        magic = self.memory[:4]
        if magic != _MAGIC:
            found = _OTHER_FORMATS.get(magic, f"it starts with {magic!r}")
            raise ModelFileError(
                f"{self.path} is not a GGUF file: {found}", f"give a .gguf file; those start with {_MAGIC!r}"
            )
        self.at = 4
        version = self.number("<I")
        if version in (2, 3):
            return
        if version & 0xFFFF == 0:
            self.unsupported("big-endian GGUF", "convert it with gguf's gguf-convert-endian")
        self.unsupported(f"GGUF version {version}; 2 and 3 are read", "convert the model again")

    def count(self, what: str, least_bytes: int, limit: int) -> int:
        """Read a count of things that take at least `least_bytes` each."""
        count = self.number("<Q")
        self.check_count(count, what, least_bytes, limit)
        return count

    def check_count(self, count: int, what: str, least_bytes: int, limit: int) -> None:
        fitting = (self.end - self.at) // least_bytes
        if count > fitting:
            self.damaged(f"{count} {what} announced where at most {fitting} fit")
        if count > limit:
            self.damaged(f"{count} {what} announced, the limit is {limit}", "convert the model again")

    def number(self, layout: str) -> int:
        (value,) = self.take(struct.Struct(layout))
        assert isinstance(value, int)
        return value

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        start, self.at = self.at, self.at + layout.size
        if self.at > self.end:
            self.truncated()
        return layout.unpack_from(self.memory, start)

    def name(self, what: str) -> str:
        name = self.strings(what, 1)[0]
        if len(name) > MAX_NAME_CHARACTERS:
            self.damaged(f"{what} of {len(name)} characters, the limit is {MAX_NAME_CHARACTERS}")
        return name

    def strings(self, what: str, count: int) -> list[str]:
        """Read `count` strings. Vocabularies come through here, so the loop is kept bare."""
        memory, end, at = self.memory, self.end, self.at
        unpack = struct.Struct("<Q").unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(memory, at)[0]
                if at > end:
                    self.truncated()
                append(memory[start:at].decode())
        except struct.error:
            self.truncated()
        except UnicodeDecodeError as error:
            self.damaged(
                f"{what}, string {len(out)}, is not UTF-8: {error.reason} at byte {start + error.start}"
            )
        self.at = at
        return out

    def value(self, key: str, kind: int, depth: int) -> Any:
        """Read one metadata value of the given type id."""
        if kind == _STRING:
            return self.strings(repr(key), 1)[0]
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        return self.scalars(key, kind, 1)[0]

    def array(self, key: str, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            self.damaged(f"{key!r}: arrays nested deeper than {MAX_ARRAY_DEPTH}")
        kind = self.number("<I")
        if kind not in _LEAST_BYTES:
            self.damaged(f"{key!r}: array of unknown value type {kind}; known are 0 to 12")
        count = self.number("<Q")
        self.check_count(count, f"elements of {key!r}", _LEAST_BYTES[kind], self.elements_left)
        self.elements_left -= count
        if kind == _STRING:
            return self.strings(repr(key), count)
        if kind == _ARRAY:
            return [self.array(key, depth + 1) for _ in range(count)]
        return self.scalars(key, kind, count)

    def scalars(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            self.damaged(f"{key!r}: unknown value type {kind}; known are 0 to 12")
        dtype = _SCALARS[kind]
        start, self.at = self.at, self.at + count * dtype.itemsize
        if self.at > self.end:
            self.truncated()
        values = np.frombuffer(self.memory, dtype, count, start)
        if kind == _BOOL:
            if count and values.max() > 1:
                self.damaged(f"{key!r}: boolean of value {values.max()}; 0 and 1 are allowed")
            values = values.astype(np.bool_)
        return list(values.tolist())

    def refuse_split(self, metadata: dict[str, Any]) -> None:
        parts = metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            self.unsupported(
                f"a model split over {parts} files",
                "merge them with `llama-gguf-split --merge FIRST OUT.gguf`",
            )

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or value <= 0 or value & (value - 1) or value > self.size:
            self.damaged(f"general.alignment is {value!r:.40}; it must be a power of two within the file")
        return value

    def tensor(self, alignment: int) -> TensorInfo:
        """Read one tensor's entry; its offset still counts from the start of the data."""
        name = self.name("tensor name")
        dimensions = self.number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.damaged(f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = self.take(struct.Struct(f"<{dimensions}Q"))[::-1]
        kind = self.tensor_type(name)
        offset = self.number("<Q")
        if 0 in shape:
            self.damaged(f"tensor {name!r} of shape {shape} has no elements")
        if shape[-1] % kind.block_size:
            self.damaged(
                f"tensor {name!r} has rows of {shape[-1]} elements, "
                f"no multiple of {kind.name}'s block of {kind.block_size}"
            )
        if offset % alignment:
            self.damaged(f"tensor {name!r} at offset {offset} is not aligned to {alignment} bytes")
        nbytes = kind.nbytes(math.prod(shape)) * (2 if name in self.indices else 1)
        if nbytes > self.size:
            self.damaged(f"tensor {name!r} takes {nbytes} bytes, the file has {self.size}")
        return TensorInfo(name, shape, kind, offset, nbytes)

    def tensor_type(self, name: str) -> TensorType:
        number = self.number("<I")
        if self.allow_indices and UNSUPPORTED_NAMES.get(number) == "I64":
            self.indices.append(name)
            return TensorType.F32  # of twice as many bytes
        try:
            return TensorType(number)
        except ValueError:
            known = ", ".join(kind.name for kind in TensorType)
            self.unsupported(
                f"tensor {name!r} has type {UNSUPPORTED_NAMES.get(number, number)}",
                f"use a file quantised to one of {known}",
            )

    def placed(self, tensors: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Turn offsets into places in the file; refuse places outside it or inside one another."""
        base = -(-self.at // alignment) * alignment
        placed = {
            info.name: TensorInfo(info.name, info.shape, info.type, base + info.offset, info.nbytes)
            for info in tensors.values()
        }
        end, before = base, ""
        for info in sorted(placed.values(), key=lambda info: info.offset):
            if info.offset < end:
                self.damaged(f"tensor {info.name!r} overlaps tensor {before!r}")
            end, before = info.offset + info.nbytes, info.name
            if end > self.size:
                self.damaged(f"tensor {info.name!r} ends at byte {end}, the file has {self.size}")
        return placed

    def truncated(self) -> NoReturn:
        if self.end < self.size:
            self.damaged(f"the header is longer than {MAX_HEADER_BYTES} bytes")
        self.damaged(f"the header runs past the end of the file at byte {self.size}")

    def damaged(self, what: str, hint: str = DAMAGED) -> NoReturn:
        self.refuse(ModelFileError, what, hint)

    def unsupported(self, what: str, hint: str) -> NoReturn:
        self.refuse(UnsupportedModelError, what, hint)

    def refuse(self, kind: type[PacelineError], what: str, hint: str) -> NoReturn:
        raise kind(f"{self.path}: {what}", hint)
