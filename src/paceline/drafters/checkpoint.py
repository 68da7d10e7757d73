"""Opening a drafter's checkpoint: what kind it is, and its tensors by one name each, whatever the file.

What would run wrongly is refused: a head that reads the wrong layer raises no error, it only drafts badly.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Floats
from paceline.drafters.checkpoint_arrays import Array, Contents, from_safetensors
from paceline.drafters.checkpoint_gguf import read_gguf
from paceline.drafters.checkpoint_names import KINDS, flatten, layout_of, plain_name, recognise, renamed
from paceline.errors import ModelFileError, UnsupportedModelError, UsageError, suggest
from paceline.weights.folder import open_shards
from paceline.weights.hf_files import read_optional
from paceline.weights.mapping import TensorInfo, blank
from paceline.weights.quantize import quantize
from paceline.weights.quants import Bytes, TensorType
from paceline.weights.safetensors import SafetensorsFile

DTYPES: dict[str, TensorType | None] = {
    "auto": TensorType.Q8_0,
    "q8": TensorType.Q8_0,
    "q4": TensorType.Q4_0,
    "bf16": TensorType.BF16,
    "f32": TensorType.F32,
}
"""What matrices become as they are loaded. "auto" leaves what a GGUF file has quantised as it is."""

_WIDE = (TensorType.F32, TensorType.F16, TensorType.BF16)

_LOOKED_UP = ("token_embd.weight", "markov_head.markov_w1.weight")
"""Tables that stay as they are: a look-up reads one row."""

_REFUSED = {
    "dflash2": "DFlash2 drafters",
    "pard2": "PARD-2 drafters",
    "medusa": "Medusa heads",
    "mlp": "MLP speculators",
    "lstm": "Arctic LSTM speculators",
    "model": "complete models",
}
"""Kinds that are recognised and do not run as a head."""


class Checkpoint:
    """An open checkpoint of a head; has of `weights.source.Source` what `models.Tensors` asks for.

    Attributes:
        kind: "eagle3", "eagle", "mtp", "dflash" or "dspark".
        layout: whose way of writing it down.
        settings: config.json with nested parts flattened, or a GGUF file's keys without the architecture.
        identity: differs between files of different content.
        tensors: name to shape and the type it has after loading.
        interleaved: rows of query and key are in the order in which rope turns neighbours.
        nbytes: what it takes in its files.
    """

    def __init__(self, path: Path, inside: Contents, dtype: str) -> None:
        self.path = path
        self.kind = inside.kind
        self.layout = inside.layout
        self.settings = inside.settings
        self.identity = inside.identity
        self.interleaved = inside.interleaved
        self._arrays = inside.arrays
        self._indices = inside.indices
        self._dtype = dtype
        self.nbytes = sum(array.nbytes for array in inside.arrays.values())
        self.tensors = {name: self._info(name, array) for name, array in inside.arrays.items()}

    def has(self, name: str) -> bool:
        return name in self.tensors or name in self._indices

    def add(self, name: str, values: Floats) -> None:
        """Add a tensor that follows from the settings."""
        self._arrays[name] = Array.of(values)
        self.tensors[name] = self._info(name, self._arrays[name])

    def keep_rows(self, name: str, rows: NDArray[np.int64], of: Array | None = None) -> None:
        """Leave some rows of a matrix, or make it of some rows of another."""
        whole = of or self._arrays[name]
        raw = np.ascontiguousarray(whole.read().reshape(whole.shape[0], -1)[rows]).reshape(-1)
        self._arrays[name] = Array(whole.type, (len(rows), *whole.shape[1:]), lambda: raw)
        self.tensors[name] = self._info(name, self._arrays[name])

    def map_ids(self, ids: NDArray[np.int64]) -> None:
        """Say which of the target's ids, ascending, the rows of the output stand for."""
        self._indices["d2t"] = ids if self.layout == "GGUF" else ids - np.arange(len(ids))
        self._indices.pop("t2d", None)

    def data(self, name: str) -> Bytes:
        """Bytes of a tensor, rounded to the type that `tensors` says.

        Raises:
            ModelFileError: values that are not finite.
        """
        array, kind = self._arrays[name], self.tensors[name].type
        if kind == array.type:
            return np.ascontiguousarray(array.read())
        if kind in (TensorType.Q8_0, TensorType.Q4_0):
            rows, cols = array.shape
            return quantize(name, rows, cols, array.values, kind)
        values = np.ascontiguousarray(array.values())
        if kind is TensorType.BF16:
            bits = values.view(np.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return nearest.astype(np.uint16).view(np.uint8).reshape(-1)
        return values.view(np.uint8).reshape(-1)

    def values(self, name: str, start: int = 0, end: int | None = None) -> Floats:
        """Rows of a tensor that is there, in float32 and not rounded."""
        return self._arrays[name].values(start, end)

    def release(self, name: str) -> None:
        """Let the system drop a tensor's pages of the mapped file; reading brings them back."""
        self._arrays[name].drop()

    def indices(self, name: str) -> NDArray[np.int64]:
        """A tensor of ids."""
        return self._indices[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that must be there.

        Raises:
            ModelFileError: it is not.
        """
        if name not in self.tensors:
            raise self.fault(f"there is no tensor {name}", "the checkpoint is incomplete; download it again")
        return self.tensors[name].shape

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these settings that is given."""
        for name in names:
            if self.settings.get(name) is not None:
                return self.settings[name]
        return default

    def keep_layers(self, count: int) -> None:
        """Forget the layers behind the first so many."""
        for name in list(self.tensors):
            match = re.match(r"blk\.(\d+)\.", name)
            if match is not None and int(match[1]) >= count:
                del self.tensors[name]

    def layer_count(self) -> int:
        """Decoder layers of the head."""
        found = {int(match[1]) for name in self.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
        if found != set(range(len(found))) or not found:
            raise self.fault(f"its layers are {sorted(found)}", "they must be numbered from 0 without a gap")
        return len(found)

    def describe(self) -> str:
        """One line for people: what was found."""
        kinds = {info.type.name for info in self.tensors.values() if len(info.shape) == 2}
        count = sum(int(np.prod(info.shape)) for info in self.tensors.values())
        return (
            f"{self.kind} head ({self.layout} layout), {self.layer_count()} layer"
            f"{'s' if self.layer_count() > 1 else ''}, {count / 1e6:.1f} M weights as "
            f"{'/'.join(sorted(kinds)).lower()}: {self.path}"
        )

    def fault(self, what: str, hint: str) -> ModelFileError:
        """What to raise when something about the checkpoint is wrong."""
        return ModelFileError(f"{self.path}: {what}", hint)

    def _info(self, name: str, array: Array) -> TensorInfo:
        kind = self._rounded(name, array)
        elements = int(np.prod(array.shape, dtype=np.int64))
        return TensorInfo(name, array.shape, kind, 0, kind.nbytes(elements))

    def _rounded(self, name: str, array: Array) -> TensorType:
        wanted = DTYPES[self._dtype]
        if len(array.shape) != 2:
            return TensorType.F32
        if name in _LOOKED_UP or (self._dtype == "auto" and array.type not in _WIDE):
            return array.type
        assert wanted is not None
        if array.shape[1] % wanted.block_size:
            return TensorType.F32
        if wanted is TensorType.Q4_0 and name == "output.weight":
            return TensorType.Q8_0
        return wanted


class Outline(Checkpoint):
    """A checkpoint whose weights are never read, for telling what they would take; all count as positive."""

    def data(self, name: str) -> Bytes:
        return blank(self.tensors[name])

    def values(self, name: str, start: int = 0, end: int | None = None) -> Floats:
        count, *others = self._arrays[name].shape
        return np.broadcast_to(np.float32(1), (len(range(count)[start:end]), *others))

    def keep_rows(self, name: str, rows: NDArray[np.int64], of: Array | None = None) -> None:
        whole = of or self._arrays[name]
        self._arrays[name] = replace(whole, shape=(len(rows), *whole.shape[1:]))
        self.tensors[name] = self._info(name, self._arrays[name])


def open_checkpoint(
    path: str | Path, dtype: str = "auto", kind: str | None = None, *, outline: bool = False
) -> Checkpoint:
    """Open a folder of safetensors, one safetensors file with its config.json beside it, or a GGUF file.

    Args:
        dtype: a key of `DTYPES`.
        kind: what is looked for, for errors.
        outline: make one whose weights are never read.

    Raises:
        UsageError: there is no such dtype.
        ModelFileError: the checkpoint cannot be read, or is incomplete.
        UnsupportedModelError: it is of a kind that does not run here, by name.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype of a drafter is {dtype!r}", suggest(str(dtype), list(DTYPES)))
    inside = look_into(path := Path(path))
    _refuse_kind(path, inside.kind, kind)
    if inside.unknown and inside.kind != "mtp":
        shown = ", ".join(map(repr, inside.unknown[:3]))
        more = f" and {len(inside.unknown) - 3} more" if len(inside.unknown) > 3 else ""
        raise UnsupportedModelError(
            f"{path}: a drafter of kind {inside.kind} with tensors that are not known here: {shown}{more}",
            "without them it would draft badly; update Paceline or use another checkpoint",
        )
    return (Outline if outline else Checkpoint)(path, inside, dtype)


def look_into(path: Path) -> Contents:
    """Read what a folder, or a file, holds, whether it runs here or not.

    Raises:
        ModelFileError, UnsupportedModelError: it cannot be read.
    """
    if path.suffix == ".gguf":
        return read_gguf(path)
    if path.is_dir():
        shards, folder = open_shards(path), path
    else:
        shards, folder = [SafetensorsFile(path)], path.parent
    settings = flatten(read_optional(folder / "config.json"))
    arrays, indices = from_safetensors(shards)
    shapes = {name: array.shape for name, array in arrays.items()}
    kind = recognise(settings, shapes)
    identity = _identity(settings, shards)
    if kind not in KINDS:
        return Contents(kind, "", settings, arrays, indices, identity)
    named, unknown = renamed(arrays, kind, settings)
    ids = {plain_name(name) or name: values for name, values in indices.items()}
    layout = layout_of(settings, shapes, kind)
    return Contents(kind, layout, settings, named, ids, identity, unknown=tuple(unknown))


def _identity(settings: dict[str, Any], shards: Sequence[SafetensorsFile]) -> str:
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for shard in shards:
        digest.update(shard.fingerprint + shard.nbytes.to_bytes(8))
    return digest.hexdigest()[:32]


def _complete(path: Path, wanted: str | None) -> UnsupportedModelError:
    """What to raise for a model without a head."""
    hint = "leave mtp out, or give another file" if wanted == "mtp" else f"give it as model:{path}"
    return UnsupportedModelError(f"{path} holds a complete model and no head that drafts for one", hint)


def _refuse_kind(path: Path, kind: str, wanted: str | None) -> None:
    if kind in KINDS:
        return
    if kind == "model":
        raise _complete(path, wanted)
    what = _REFUSED.get(kind, f"drafters of kind {kind!r}" if kind else "")
    if not what:
        raise UnsupportedModelError(
            f"{path} is no drafter that is known here, by its keys and tensors",
            f"what runs: {', '.join(KINDS)}, and complete models as model:PATH",
        )
    raise UnsupportedModelError(f"{path}: {what} do not run here yet", f"what runs: {', '.join(KINDS)}")
