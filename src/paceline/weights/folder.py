"""A Hugging Face folder - config.json, safetensors, a tokenizer - with the face of a GGUF file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from paceline.core import Floats
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.weights import hf_config, hf_tokenizer
from paceline.weights.hf_files import DOWNLOAD, read_json
from paceline.weights.hf_tensors import Recipe, recipes
from paceline.weights.mapping import TensorInfo
from paceline.weights.quantize import METHODS, quantize
from paceline.weights.quants import Bytes, TensorType, dequantize
from paceline.weights.safetensors import SafetensorsFile

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PART = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


class Folder:
    """An open folder; implements `source.Source`, and is a context manager.

    Rows of query and key are brought into GGUF's order, one is added to Gemma's norms, experts are stacked:
    what runs then cannot tell a folder from a file, and writes the same bytes.
    """

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Any],
        shards: list[SafetensorsFile],
        made: dict[str, Recipe],
        rounded: dict[str, TensorType],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self._shards = shards
        self._shard_of = {name: shard for shard in shards for name in shard.entries}
        self._recipes = made
        self._rounded = rounded
        self.tensors = {name: self._info(name, recipe) for name, recipe in made.items()}

    @classmethod
    def open(cls, path: Path, quantize: str | None = None) -> Folder:
        """Map a folder's files and read their headers.

        Args:
            quantize: a key of `quantize.METHODS`; None runs the weights as they are.

        Raises:
            ModelFileError: files are missing or damaged, or do not fit together.
            UnsupportedModelError: a model, setting or tensor that does not run here, by name.
        """
        settings = _settings(path)
        metadata = {"general.name": path.name, **hf_config.translate(settings)}
        shards = open_shards(path)
        arrays = {name: entry for shard in shards for name, entry in shard.entries.items()}
        made = recipes(arrays, settings, hf_config.head_dim(settings))
        metadata |= hf_tokenizer.translate(path, settings)
        if quantize is not None and "output.weight" not in made:
            # The head is rounded, the embedding it is tied to is not: a look-up reads one row.
            made["output.weight"] = made["token_embd.weight"]
        rounded = {} if quantize is None else _rounded(made, METHODS[quantize])
        return cls(path, metadata, shards, made, rounded)

    @property
    def nbytes(self) -> int:
        """Size of the files with weights."""
        return sum(shard.nbytes for shard in self._shards)

    def data(self, name: str) -> Bytes:
        """Return a tensor's bytes [nbytes]: a view of the file where nothing had to be done to it."""
        recipe = self._recipes[name]
        if recipe.values is not None:
            return np.frombuffer(recipe.values.tobytes(), np.uint8)
        if name in self._rounded:
            return self._quantized(name, recipe)
        parts = [self._part(recipe, i) for i in range(len(recipe.parts))]
        if recipe.plus_one:
            values = dequantize(recipe.type, parts[0], recipe.shape) + np.float32(1)
            return values.view(np.uint8).reshape(-1)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def release(self, name: str) -> None:
        """Let the system drop the pages of a tensor's arrays; `data` brings them back."""
        for part in self._recipes[name].parts:
            self._shard_of[part].release(part)

    def identity(self) -> str:
        """Name the folder by its configuration and its files' fingerprints, without reading all weights."""
        digest = hashlib.sha256((self.path / CONFIG).read_bytes())
        for shard in self._shards:
            digest.update(shard.fingerprint + shard.nbytes.to_bytes(8))
        digest.update(repr(sorted(set(self._rounded.values()))).encode())
        return digest.hexdigest()[:32]

    def forget_arrays(self) -> None:
        """Drop the vocabulary: a tokenizer that was built holds its own."""
        for key, value in list(self.metadata.items()):
            if isinstance(value, list) or key == hf_tokenizer.JSON_KEY:
                del self.metadata[key]

    def close(self) -> None:
        """Give the maps back as soon as the last view of each is gone."""
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _info(self, name: str, recipe: Recipe) -> TensorInfo:
        kind = self._rounded.get(name, TensorType.F32 if recipe.plus_one else recipe.type)
        offset = self._shard_of[recipe.parts[0]].entries[recipe.parts[0]].offset if recipe.parts else 0
        elements = int(np.prod(recipe.shape, dtype=np.int64))
        return TensorInfo(name, recipe.shape, kind, offset, kind.nbytes(elements))

    def _part(self, recipe: Recipe, index: int) -> Bytes:
        """The bytes of one array, its rows in order."""
        name = recipe.parts[index]
        raw = self._shard_of[name].data(name)
        if recipe.order is None:
            return raw
        return raw.reshape(len(recipe.order), -1)[recipe.order].reshape(-1)

    def _quantized(self, name: str, recipe: Recipe) -> Bytes:
        *_, rows, cols = recipe.shape
        kind = self._rounded[name]
        parts = [
            quantize(name, rows, cols, self._reader(recipe, i, rows, cols), kind)
            for i in range(len(recipe.parts))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _reader(self, recipe: Recipe, index: int, rows: int, cols: int) -> Callable[[int, int], Floats]:
        name = recipe.parts[index]
        raw = self._shard_of[name].data(name).reshape(rows, -1)

        def read(start: int, end: int) -> Floats:
            order = recipe.order
            some = raw[start:end] if order is None else raw[order[start:end]]
            return dequantize(recipe.type, some.reshape(-1), (len(some), cols))

        return read


def _settings(path: Path) -> dict[str, Any]:
    if (path / CONFIG).is_file():
        return read_json(path / CONFIG)
    if files := sorted(file.name for file in path.glob("*.gguf")):
        raise ModelFileError(f"{path} is a directory", f"give a file in it: {', '.join(files[:5])}")
    if (path / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{path} holds an adapter, not a model", "merge it into its base model first"
        )
    raise ModelFileError(
        f"{path} has no {CONFIG}", "give a .gguf file, or a folder that transformers can load"
    )


def open_shards(path: Path) -> list[SafetensorsFile]:
    """Open every file with weights in a folder."""
    if (path / SINGLE).is_file():
        return [SafetensorsFile(path / SINGLE)]
    if (path / INDEX).is_file():
        return _indexed(path)
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return [SafetensorsFile(found[0])]
    if found:
        raise ModelFileError(f"{path} has {len(found)} safetensors files and no {INDEX}", DOWNLOAD)
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        raise UnsupportedModelError(
            f"{path} has its weights as pickles, which can run code",
            "load and save it with transformers, which writes safetensors",
        )
    raise ModelFileError(f"{path} has no {SINGLE}", DOWNLOAD)


def _indexed(path: Path) -> list[SafetensorsFile]:
    """Open the files an index names, and check that each tensor is where it says."""
    where = read_json(path / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelFileError(f"{path / INDEX} has no weight_map", DOWNLOAD)
    names = sorted({name if isinstance(name, str) else repr(name) for name in where.values()})
    for name in names:
        if not _PART.fullmatch(name):  # a name could lead anywhere
            raise ModelFileError(
                f"{path / INDEX} names {name[:60]!r}, which is no safetensors file", DOWNLOAD
            )
    if missing := [name for name in names if not (path / name).is_file()]:
        raise ModelFileError(f"{len(missing)} of {len(names)} files are missing: {missing[0]}", DOWNLOAD)
    shards = {name: SafetensorsFile(path / name) for name in names}
    for name, shard in shards.items():
        for tensor in shard.entries:
            if where.get(tensor) != name:
                raise ModelFileError(
                    f"{tensor!r} is in {name}, by the index in {where.get(tensor)}", DOWNLOAD
                )
    for tensor, name in where.items():
        if tensor not in shards[name].entries:
            raise ModelFileError(f"{path / name} has no tensor {tensor!r}, by the index it should", DOWNLOAD)
    return list(shards.values())


def _rounded(made: dict[str, Recipe], kind: TensorType) -> dict[str, TensorType]:
    """What quantising makes of each tensor: layers' matrices `kind`, the head always 8 bits.

    Embeddings, norms, biases and the small matrices that choose experts stay as they are.
    """
    found = {}
    for name, recipe in made.items():
        if len(recipe.shape) < 2 or recipe.shape[-1] % kind.block_size or "ffn_gate_inp" in name:
            continue
        if name.startswith("blk."):
            found[name] = kind
        elif name == "output.weight":
            found[name] = TensorType.Q8_0
    return found
