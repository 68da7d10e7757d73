"""A model's tensors handed to native code, each checked and none forgotten.

What an architecture does not ask for is refused at the end, so that no weight is ever silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.native import Program
from paceline.weights.mapping import TensorInfo
from paceline.weights.quants import Bytes, dequantize


class Holder(Protocol):
    """What holds tensors; a `weights.source.Source` does."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def data(self, name: str) -> Bytes: ...

    def release(self, name: str) -> None: ...


class Tensors:
    """Moves tensors of one model into one program."""

    def __init__(self, file: Holder, program: Program) -> None:
        self.file = file
        self._program = program
        self._taken: set[str] = set()
        self._packed: dict[str, list[int]] = {}  # parts of a program share weights

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def matrix(self, name: str, rows: int, cols: int) -> int:
        """Repack a weight matrix [rows, cols]; returns its handle."""
        return self.split(name, [rows], cols)[0]

    def split(self, name: str, sizes: Sequence[int], cols: int) -> list[int]:
        """Repack a matrix [sum of sizes, cols] as one of each size; returns their handles."""
        self._expect(name, (sum(sizes), cols))
        if name in self._packed:
            return self._packed[name]
        info = self.file.tensors[name]
        data = self.file.data(name).reshape(sum(sizes), -1)
        ends = np.cumsum(sizes)
        handles = [
            self._repack(name, int(info.type), data[end - size : end].reshape(-1), size, cols)
            for size, end in zip(sizes, ends, strict=True)
        ]
        self.file.release(name)
        self._packed[name] = handles
        return handles

    def experts(self, name: str, count: int, rows: int, cols: int) -> int:
        """Repack the matrices [count, rows, cols] of all experts as one; returns its handle."""
        self._expect(name, (count, rows, cols))
        kind, data = int(self.file.tensors[name].type), self.file.data(name)
        handle = self._repack(name, kind, data, count * rows, cols)
        self.file.release(name)
        return handle

    def embed(self, name: str, rows: int, cols: int, out: int, scale: float = 1.0) -> None:
        """Record the look-up of embedding rows [rows, cols], times `scale`; they stay in the mapped file."""
        self._expect(name, (rows, cols))
        info = self.file.tensors[name]
        self._program.embed(
            type=int(info.type), rows=rows, cols=cols, data=self.file.data(name), out=out, scale=scale
        )

    def vector(self, name: str, size: int) -> int:
        """Copy a vector [size] as float32; returns its handle."""
        return self._program.vector(self.values(name, size))

    def bias(self, name: str, size: int) -> int:
        """Like `vector`, or -1 when the file has none."""
        return self.vector(name, size) if self.has(name) else -1

    def values(self, name: str, size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        self._expect(name, (size,))
        info = self.file.tensors[name]
        flat = dequantize(info.type, self.file.data(name), info.shape).reshape(-1)
        if not np.isfinite(flat).all():
            raise ModelFileError(
                f"{name}: weights that are infinite or not a number", "the file is damaged; download it again"
            )
        return np.ascontiguousarray(flat, np.float32)

    def refuse_leftovers(self, besides: tuple[str, ...] = ()) -> None:
        """Raise if the file has tensors that nothing asked for, `besides` those that begin so."""
        left = [n for n in self.file.tensors if n not in self._taken and not n.startswith(besides)]
        if left:
            shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise UnsupportedModelError(
                f"the file has tensors this architecture does not use: {shown}",
                "without them the model would write other text; update Paceline or use another conversion",
            )

    def _repack(self, name: str, kind: int, data: NDArray[np.uint8], rows: int, cols: int) -> int:
        try:
            return self._program.weight(type=kind, rows=rows, cols=cols, data=data)
        except ValueError as error:
            raise ModelFileError(f"{name}: {error}", "the file is damaged; download it again") from error

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.file.tensors.get(name)
        if info is None:
            raise ModelFileError(
                f"the file has no tensor {name}", "it is incomplete; convert or download it again"
            )
        if info.shape != shape:
            raise ModelFileError(
                f"{name} is {info.shape}, expected {shape}", "the file is damaged; download it again"
            )
        self._taken.add(name)
