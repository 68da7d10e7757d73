from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def read_bandwidth(threads: int) -> float: ...
def instruction_sets() -> list[str]: ...
def trim_memory() -> None: ...
def packed_bytes(type: int, rows: int, cols: int) -> int: ...

class ContextTree:
    def follow(self, tokens: list[int]) -> None: ...

class SuffixOffer:
    tokens: list[int]
    parents: list[int]
    chances: list[float]
    def guesses(self, place: int) -> list[tuple[int, float, tuple[int, ...]]]: ...
    def child(self, place: int, token: int) -> int: ...

def suffix_offer(
    own: ContextTree, shared: ContextTree, budget: int, weights: Sequence[float], luck: float
) -> SuffixOffer: ...

class Program:
    threads: int
    isa: str
    weight_bytes: int
    memory_bytes: int
    vocabulary: int
    hidden_width: int
    feature_width: int
    def __init__(
        self,
        *,
        threads: int,
        isa: str,
        max_rows: int,
        page_size: int,
        pages: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        windowed: Sequence[bool] = (),
        window_pages: int = 0,
    ) -> None: ...
    def weight(self, type: int, rows: int, cols: int, data: NDArray[np.uint8]) -> int: ...
    def vector(self, values: NDArray[np.float32], /) -> int: ...
    def buffer(self, width: int, wanted: bool = False) -> int: ...
    def acts(self, width: int, wanted: bool = False) -> int: ...
    def embed(
        self, type: int, rows: int, cols: int, data: NDArray[np.uint8], out: int, scale: float = 1.0
    ) -> None: ...
    def norm(self, source: int, gamma: int, eps: float, out: int, column: int = 0) -> None: ...
    def quantize(self, source: int, out: int, column: int = 0) -> None: ...
    def linear(
        self,
        source: int,
        weights: Sequence[int],
        biases: Sequence[int],
        outs: Sequence[int],
        add: bool = False,
    ) -> None: ...
    def float_norm(self, source: int, gamma: int, eps: float, to: int, add: bool = False) -> None: ...
    def gated(self, source: int, gate: int, up: int, out: int, gelu: bool = False) -> None: ...
    def mixture(self, *, experts: int, used: int, normalised: bool, width: int, hidden: int) -> int: ...
    def experts(
        self, mixture: int, scores: int, x: int, gamma: int, eps: float, gate: int, up: int, down: int
    ) -> None: ...
    def angles(self, frequencies: Sequence[float], magnitude: float = 1.0) -> int: ...
    def rope(
        self,
        layer: int,
        q: int,
        k: int,
        v: int,
        angles: int,
        interleaved: bool,
        query_scale: float,
        q_gamma: int = -1,
        k_gamma: int = -1,
        eps: float = 0.0,
    ) -> None: ...
    def attention(self, layer: int, q: int, out: int, window: int = 0, cap: float = 0.0) -> None: ...
    def head(self, source: int, weight: int, cap: float = 0.0) -> None: ...
    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        parents: NDArray[np.int32],
        sequences: NDArray[np.int32],
        tables: NDArray[np.int32],
        wanted: NDArray[np.int32],
        argmax: NDArray[np.int32],
        logits: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
        features: NDArray[np.float32] | None = None,
        reach: NDArray[np.int32] | None = None,
        part: int = 0,
        window_tables: NDArray[np.int32] | None = None,
    ) -> None: ...
    def part(self) -> int: ...
    def adopt(self, other: Program, weight: int) -> int: ...
    def tap(self, buffer: int) -> int: ...
    def listen(self, taps: Sequence[int]) -> None: ...
    def feed(self, buffer: int, column: int = 0) -> None: ...
    def move(
        self,
        table: NDArray[np.int32],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        window_table: NDArray[np.int32] | None = None,
    ) -> None: ...
    def copy_page(self, source: int, target: int, windowed: bool = False) -> None: ...
    def time_ops(self, on: bool, /) -> None: ...
    def timings(self) -> list[tuple[str, float]]: ...
