"""What a network would take in memory: it is recorded as ever, by a program that only counts.

So nothing is recorded that is not counted, and what does not run is refused in the same words. No weight is
read meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.native import packed_bytes
from paceline.weights.mapping import TensorInfo, blank
from paceline.weights.quants import Bytes

if TYPE_CHECKING:
    from paceline.models.tensors import Holder

_ARGMAX = 7  # its place among the arguments of a pass
_FLOAT = 4
_ACTIVATION = 2  # a byte for each value, and scales and sums of groups


class Tally:
    """Takes the place of `native.Program`: the same calls, and `run` does nothing.

    Attributes:
        matrices: bytes of repacked matrices; those of other programs belong to these.
        vectors: bytes of vectors.
        workspace: bytes of buffers and activations.
    """

    def __init__(self, *, max_rows: int, threads: int = 1, isa: str = "portable", **cache: Any) -> None:  # noqa: ARG002
        self.threads, self.isa = threads, isa
        self.matrices = self.vectors = self.workspace = 0
        self.hidden_width = self.feature_width = 0
        self._max_rows = max_rows
        self._widths: list[int] = []
        self._taps: list[int] = []
        self._handles = self._parts = 0

    @property
    def weight_bytes(self) -> int:
        return self.matrices

    def weight(self, type: int, rows: int, cols: int, data: NDArray[np.uint8]) -> int:  # noqa: ARG002
        self.matrices += packed_bytes(type, rows, cols)
        return self._handle()

    def adopt(self, other: Tally, weight: int) -> int:  # noqa: ARG002
        return self._handle()

    def vector(self, values: NDArray[np.float32], /) -> int:
        self.vectors += _FLOAT * len(values)
        return self._handle()

    def buffer(self, width: int, wanted: bool = False) -> int:  # noqa: ARG002
        self.workspace += self._max_rows * width * _FLOAT
        self._widths.append(width)
        return len(self._widths) - 1

    def acts(self, width: int, wanted: bool = False) -> int:  # noqa: ARG002
        self.workspace += self._max_rows * width * _ACTIVATION
        return self._handle()

    def mixture(self, *, experts: int, used: int, normalised: bool, width: int, hidden: int) -> int:  # noqa: ARG002
        self.workspace += self._max_rows * used * (_ACTIVATION * (width + hidden) + _FLOAT * width)
        return self._handle()

    def feed(self, buffer: int, column: int = 0) -> None:
        self.feature_width = max(self.feature_width, column + self._widths[buffer])

    def tap(self, buffer: int) -> int:
        self._taps.append(self._widths[buffer])
        return len(self._taps) - 1

    def listen(self, taps: Sequence[int]) -> None:
        self.hidden_width = sum(self._taps[tap] for tap in taps)

    def angles(self, frequencies: Sequence[float], magnitude: float = 1.0) -> int:  # noqa: ARG002
        return self._handle()

    def part(self) -> int:
        self._parts += 1
        return self._parts

    def embed(self, **lookup: Any) -> None: ...

    def norm(self, *operands: Any) -> None: ...

    def quantize(self, *operands: Any) -> None: ...

    def linear(self, *operands: Any, add: bool = False) -> None: ...

    def float_norm(self, *operands: Any, add: bool = False) -> None: ...

    def gated(self, *operands: Any) -> None: ...

    def experts(self, *operands: Any) -> None: ...

    def rope(self, *operands: Any, **gammas: Any) -> None: ...

    def attention(self, *operands: Any) -> None: ...

    def head(self, *operands: Any) -> None: ...

    def run(self, *rows: Any, **more: Any) -> None:  # noqa: ARG002
        """Leave everything as it is, but for the likeliest tokens, which the caller looks at."""
        rows[_ARGMAX][:] = 0

    def _handle(self) -> int:
        self._handles += 1
        return self._handles - 1


class Unread:
    """Tensors of a model whose data nobody reads; has of `weights.source.Source` what `Tensors` asks for."""

    def __init__(self, file: Holder) -> None:
        self._file = file

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._file.tensors

    def data(self, name: str) -> Bytes:
        return blank(self.tensors[name])

    def release(self, name: str) -> None:
        pass
