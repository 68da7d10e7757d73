"""safetensors files: named arrays behind a JSON header, over a read-only memory map.

The format: eight bytes with the header's length, little-endian; the header, a JSON object from tensor name
to dtype, shape and the half-open range of its bytes after the header; then the bytes, without a gap. All of
that is checked before anything else is done, as in the safetensors library itself. That library is not used
because it has no bfloat16 without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.weights.mapping import DAMAGED, drop_pages, map_file
from paceline.weights.quants import Bytes

MAX_HEADER_BYTES = 16 << 20  # the format allows 100 MB; a hundred thousand tensors take a tenth of it
MAX_DIMENSIONS = 8
MAX_NAME_CHARACTERS = 256

_SAMPLE = 1 << 16

_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an array lies in its file.

    Attributes:
        dtype: as the format spells it, such as "BF16".
        offset: bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file.

    Attributes:
        entries: name to place, in file order.
        nbytes: size of the file.
        fingerprint: hash of the header and of the end of the file: another one for another tuning.
    """

    def __init__(self, path: Path) -> None:
        """Map a file and read its header.

        Raises:
            ModelFileError: the file cannot be read, is no safetensors file, or is damaged.
            UnsupportedModelError: it is sound, but has a dtype that is not known.
        """
        self.path = path
        memory = map_file(path, ".safetensors")
        header, self.entries = _Header(path, memory).read()
        self.nbytes = len(memory)
        self.fingerprint = hashlib.sha256(header + memory[-_SAMPLE:]).digest()
        self._memory: mmap.mmap | None = memory

    def data(self, name: str) -> Bytes:
        """Return an array's bytes [nbytes], a read-only view that stays valid after `close`."""
        assert self._memory is not None
        entry = self.entries[name]
        view = np.frombuffer(self._memory, np.uint8, entry.nbytes, entry.offset)
        # Writers align; a file that does not is read at the price of a copy.
        return view if entry.offset % _ITEM_BYTES[entry.dtype] == 0 else view.copy()

    def release(self, name: str) -> None:
        """Let the system drop an array's pages; `data` brings them back. Whole pages only."""
        if self._memory is not None:
            drop_pages(self._memory, self.entries[name].offset, self.entries[name].nbytes)

    def close(self) -> None:
        """Give the map back as soon as the last view of it is gone."""
        self._memory = None


_WRITTEN = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}


def write_safetensors(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays of float32, float16, int64 and bool: those of larger items first, so that all align."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {}
    at = 0
    for name, array in ordered:
        place = [at, at + array.nbytes]
        header[name] = {
            "dtype": _WRITTEN[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": place,
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in ordered:
            file.write(array.astype(array.dtype.newbyteorder("<"), order="C").tobytes())


class _Header:
    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self.memory = memory

    def read(self) -> tuple[bytes, dict[str, Entry]]:
        raw = self.raw()
        entries: dict[str, Entry] = {}
        for name, value in self.parsed(raw).items():
            if name != "__metadata__":
                entries[name] = self.entry(name, value, 8 + len(raw))
        self.check_places(entries, 8 + len(raw))
        return raw, dict(sorted(entries.items(), key=lambda item: item[1].offset))

    def raw(self) -> bytes:
        if len(self.memory) < 8:
            self.damaged(f"{len(self.memory)} bytes are no safetensors file")
        (length,) = struct.unpack_from("<Q", self.memory)
        if self.memory[:7] == b"version":
            self.damaged("a git-lfs pointer, not the weights themselves", "run `git lfs pull`")
        if length > MAX_HEADER_BYTES:
            self.damaged(f"a header of {length} bytes is announced, the limit is {MAX_HEADER_BYTES}")
        if length > len(self.memory) - 8:
            self.damaged(f"a header of {length} bytes is announced, {len(self.memory) - 8} follow")
        return self.memory[8 : 8 + length]

    def parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            value = json.loads(raw.decode(), object_pairs_hook=self.unique)
        except UnicodeDecodeError:
            self.damaged("the header is not UTF-8")
        except (ValueError, RecursionError) as error:
            self.damaged(f"the header is not JSON: {str(error) or 'nested too deep'}")
        if not isinstance(value, dict):
            self.damaged("the header is not a JSON object")
        return value

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            self.damaged(f"{twice[:MAX_NAME_CHARACTERS]!r} occurs twice in the header")
        return found

    def entry(self, name: str, value: Any, base: int) -> Entry:
        if len(name) > MAX_NAME_CHARACTERS:
            self.damaged(f"a name of {len(name)} characters, the limit is {MAX_NAME_CHARACTERS}")
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            self.damaged(f"tensor {name!r} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has dtype {str(dtype)[:40]}",
                f"known are {', '.join(_ITEM_BYTES)}",
            )
        if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
            self.damaged(f"tensor {name!r} has the shape {str(shape)[:60]}")
        if not _sizes(offsets) or len(offsets) != 2:
            self.damaged(f"tensor {name!r} lies at {str(offsets)[:60]}")
        begin, end = offsets
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        if end - begin != nbytes:
            self.damaged(f"tensor {name!r} takes {nbytes} bytes, not those from {begin} to {end}")
        return Entry(name, dtype, tuple(shape), base + begin, nbytes)

    def check_places(self, entries: dict[str, Entry], base: int) -> None:
        end, before, size = base, "", len(self.memory)
        for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
            if entry.offset < end:
                self.damaged(f"tensor {entry.name!r} overlaps tensor {before!r}")
            if entry.offset > end:
                self.damaged(f"{entry.offset - end} bytes before tensor {entry.name!r} belong to none")
            end, before = entry.offset + entry.nbytes, entry.name
            if end > size:
                self.damaged(f"tensor {entry.name!r} ends at byte {end}, the file has {size}")
        if end < size:
            self.damaged(f"{size - end} bytes at the end belong to no tensor")

    def damaged(self, what: str, hint: str = DAMAGED) -> NoReturn:
        raise ModelFileError(f"{self.path}: {what}", hint)


def _sizes(value: Any) -> bool:
    """Whether this is a list of whole numbers that could be sizes."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
