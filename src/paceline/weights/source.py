"""One face for every kind of model on disk: architectures and tokenizers know no file format.

Names are GGUF's: metadata keys as its specification has them, tensors as llama.cpp's converters name them.
A folder of safetensors is translated to them when it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from paceline.core import SamplingParams
from paceline.errors import ModelFileError, RequestError, UsageError
from paceline.weights.gguf import GGUFFile
from paceline.weights.mapping import TensorInfo
from paceline.weights.quants import Bytes


@runtime_checkable
class Source(Protocol):
    """An open model; also a context manager.

    Attributes:
        path: the file or folder.
        metadata: key to value, `general.architecture` among them.
        tensors: name to shape and type.
        nbytes: what it takes on disk.
    """

    path: Path
    metadata: dict[str, Any]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def nbytes(self) -> int: ...

    def data(self, name: str) -> Bytes:
        """Return a tensor's bytes [nbytes], read-only, valid as long as they are held."""
        ...

    def release(self, name: str) -> None:
        """Give back the memory that reading a tensor took; `data` brings it back."""
        ...

    def identity(self) -> str:
        """A short name that differs between models of different content."""
        ...

    def forget_arrays(self) -> None:
        """Drop what only building a tokenizer needs."""
        ...

    def close(self) -> None:
        """Let go of the files; views of their data stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_model(path: str | os.PathLike[str], quantize: str | None = None) -> Source:
    """Open a .gguf file or a folder of safetensors.

    Args:
        quantize: "q8" or "q4": round a folder's weights as they are loaded. A GGUF file runs as it is.

    Raises:
        UsageError: a value or a file that `quantize` does not apply to.
        ModelFileError, UnsupportedModelError: it cannot be read, or run.
    """
    # Opened less often than files; brings a parser for each of its parts.
    from paceline.weights.folder import Folder
    from paceline.weights.quantize import check_method

    check_method(quantize)
    path = Path(path)
    if path.is_dir():
        return Folder.open(path, quantize)
    file = GGUFFile.open(path)
    if quantize is not None:
        file.close()
        raise UsageError(
            f"{path} is quantised already, or not, as its file says; {quantize!r} does not apply",
            "leave quantize out, or give the folder with its safetensors",
        )
    return file


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def default_sampling(metadata: Mapping[str, Any]) -> SamplingParams:
    """How a model's authors say it is sampled (`general.sampling.*`), else `SamplingParams()`.

    Raises ModelFileError for values that mean nothing.
    """
    keys = {ours: f"general.sampling.{theirs}" for theirs, ours in _SAMPLING.items()}
    try:
        return SamplingParams(**{ours: metadata[key] for ours, key in keys.items() if key in metadata})
    except RequestError as error:
        raise ModelFileError(f"the model's sampling defaults: {error.message}", "correct its files") from None
