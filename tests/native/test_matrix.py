"""One matrix at a time: every weight type on every instruction set, against numpy in float64.

The program is embed -> quantize -> head: token t picks row t of an F32 table, so the test knows the
activations exactly, redoes their rounding in numpy, and the rest is one product.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core import ROOT, Floats, Ids
from paceline.native import Program, instruction_sets
from paceline.weights.quants import BLOCK_LAYOUT, TensorType, dequantize
from support.activations import FLOATING, LEAST_BF16, seen_by
from support.gguf_writer import Tensor

ISAS = instruction_sets()
KINDS = list(TensorType)
MAX_ROWS = 40


@dataclass
class Result:
    logits: Floats
    argmax: Ids


def product(
    weights: Tensor,
    table: Tensor,
    tokens: list[int],
    *,
    isa: str,
    threads: int = 1,
    logits: bool = True,
) -> Result:
    """Rows `tokens` of `table` [ids, cols] times the transpose of `weights` [rows, cols]."""
    rows, cols = weights.shape
    program = Program(
        threads=threads,
        isa=isa,
        max_rows=MAX_ROWS,
        page_size=32,
        pages=1,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=16,
    )
    x, acts = program.buffer(cols), program.acts(cols)
    data = np.frombuffer(table.raw, np.uint8)
    program.embed(type=int(table.type), rows=table.shape[0], cols=cols, data=data, out=x)
    program.quantize(x, acts)
    raw = np.frombuffer(weights.raw, np.uint8)
    program.head(acts, program.weight(type=int(weights.type), rows=rows, cols=cols, data=raw))
    return _run(program, tokens, rows, logits)


def _run(program: Program, tokens: list[int], vocab: int, wanted_logits: bool) -> Result:
    count = len(tokens)
    at = np.arange(count, dtype=np.int32) % 32
    result = Result(np.full((count, vocab), np.nan, np.float32), np.full(count, -7, np.int32))
    program.run(
        np.asarray(tokens, np.int32),
        at,
        at,
        np.full(count, ROOT, np.int32),
        np.zeros(count, np.int32),
        np.zeros((1, 1), np.int32),
        np.arange(count, dtype=np.int32),
        result.argmax,
        result.logits if wanted_logits else None,
    )
    return result


def values(tensor: Tensor) -> NDArray[np.float64]:
    """Weights as products take them, exactly."""
    wide = dequantize(tensor.type, np.frombuffer(tensor.raw, np.uint8), tensor.shape)
    if tensor.type == TensorType.BF16:
        wide = np.where(np.abs(wide) < LEAST_BF16, 0, wide)
    return wide.astype(np.float64)


def activations(rng: np.random.Generator, count: int, cols: int) -> Floats:
    """Rows with groups of very different size, as real activations have."""
    sizes = np.exp(rng.normal(0, 1.5, (count, cols // 32, 1)))
    return (rng.normal(size=(count, cols // 32, 32)) * sizes).reshape(count, cols).astype(np.float32)


def check_close(result: Result, weights: Tensor, x: Floats) -> None:
    """Within the rounding errors of a float32 sum over the groups, and of scales times minima."""
    wide = values(weights)
    seen = seen_by(weights.type, x)
    truth = seen @ wide.T
    terms = weights.shape[1] if weights.type in FLOATING else 4 * weights.shape[1] // 32
    # The sum of magnitudes of what is added, group by group; minima are added apart from the quants.
    magnitude = np.abs(seen) @ np.abs(wide).T + np.abs(seen).max() * np.abs(wide).max()
    bound = (terms + 8) * (2.0**-24 * magnitude + 2.0**-149)
    assert (np.abs(result.logits - truth) <= bound).all(), np.abs(result.logits - truth).max()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_products_match_float64_and_are_the_same_bits_everywhere(kind: TensorType) -> None:
    rng = np.random.default_rng(kind)
    rows, cols, count = 53, 768, 19
    weights = Tensor.random(kind, (rows, cols), rng)
    x = activations(rng, count, cols)
    table = Tensor.of(x)
    tokens = list(range(count))
    first = product(weights, table, tokens, isa=ISAS[0])
    check_close(first, weights, x)
    assert (first.argmax == first.logits.argmax(axis=1)).all()
    for isa in ISAS:
        for threads in (1, 2, 3, 5):
            again = product(weights, table, tokens, isa=isa, threads=threads)
            assert (again.logits == first.logits).all(), (isa, threads)
            assert (again.argmax == first.argmax).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_does_not_depend_on_its_neighbours(kind: TensorType, isa: str) -> None:
    """Any number of rows in the pass, at any place of a tile."""
    rng = np.random.default_rng(100 + kind)
    weights = Tensor.random(kind, (35, 512), rng)
    table = Tensor.of(activations(rng, 20, 512))
    alone = np.concatenate([product(weights, table, [t], isa=isa).logits for t in range(20)])
    for count in (*range(2, 10), 16, 17, 31, MAX_ROWS):
        tokens = [int(t) for t in rng.integers(0, 20, count)]
        assert (product(weights, table, tokens, isa=isa, threads=2).logits == alone[tokens]).all(), count


@pytest.mark.parametrize("cols", [32, 64, 96, 160, 224, 288, 416, 1056, 1536])
@pytest.mark.parametrize(
    "kind",
    [
        TensorType.Q4_0,
        TensorType.Q4_1,
        TensorType.Q5_0,
        TensorType.Q8_0,
        TensorType.F16,
        TensorType.BF16,
    ],
)
def test_widths_that_are_no_multiple_of_anything_larger(kind: TensorType, cols: int) -> None:
    rng = np.random.default_rng(cols)
    weights = Tensor.random(kind, (17, cols), rng)
    x = activations(rng, 9, cols)
    results = [product(weights, Tensor.of(x), list(range(9)), isa=isa, threads=2) for isa in ISAS]
    for result in results:
        check_close(result, weights, x)
        assert (result.logits == results[0].logits).all()


@pytest.mark.parametrize(
    "kind",
    [
        TensorType.Q4_0,
        TensorType.Q4_K,
        TensorType.Q6_K,
        TensorType.Q2_K,
        TensorType.F32,
        TensorType.BF16,
    ],
)
def test_matrices_wider_than_a_stretch_of_activations(kind: TensorType) -> None:
    """Kernels walk wide matrices in stretches, longer for fewer rows; where they are cut changes nothing."""
    rng = np.random.default_rng(7)
    cols = 9216
    weights = Tensor.random(kind, (16, cols), rng)
    x = activations(rng, 8, cols)
    whole = product(weights, Tensor.of(x), list(range(8)), isa=ISAS[0])
    check_close(whole, weights, x)
    for isa in ISAS:
        for count in (1, 3, 8):
            part = product(weights, Tensor.of(x), list(range(count)), isa=isa)
            assert (part.logits == whole.logits[:count]).all(), (isa, count)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 63, 64, 65, 500])
def test_any_number_of_outputs(rows: int) -> None:
    rng = np.random.default_rng(rows)
    weights = Tensor.random(TensorType.Q4_0, (rows, 64), rng)
    x = activations(rng, 3, 64)
    for threads in (1, 2, 5):
        result = product(weights, Tensor.of(x), [0, 1, 2], isa=ISAS[0], threads=threads)
        check_close(result, weights, x)
        assert (result.argmax == result.logits.argmax(axis=1)).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_embedding_rows_are_the_file_s_own_values(kind: TensorType) -> None:
    """An F32 identity as head hands the embedding through unchanged."""
    rng = np.random.default_rng(kind)
    table = Tensor.random(kind, (21, 256), rng)
    identity = Tensor.of(np.eye(256))
    result = product(identity, table, list(range(21)), isa=ISAS[0])
    wide = dequantize(kind, np.frombuffer(table.raw, np.uint8), table.shape)
    assert (result.logits == wide).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.Q4_0, TensorType.Q6_K], ids=lambda k: k.name)
def test_equal_logits_go_to_the_lowest_id(kind: TensorType, threads: int, isa: str) -> None:
    """The best row stands at several places, wherever other members find it."""
    rng = np.random.default_rng(5)
    size = kind.nbytes(256)
    raw = bytearray(Tensor.random(kind, (700, 256), rng).raw)
    x = activations(rng, 4, 256)
    plain = product(Tensor(kind, (700, 256), bytes(raw)), Tensor.of(x), [0, 1, 2, 3], isa=isa)
    best = [int(i) for i in plain.argmax]
    places = [650, 333, 82, 81, 17]
    for place in places:  # token 0's best row, many times
        raw[place * size : (place + 1) * size] = raw[best[0] * size : (best[0] + 1) * size]
    result = product(
        Tensor(kind, (700, 256), bytes(raw)), Tensor.of(x), [0, 1, 2, 3], isa=isa, threads=threads
    )
    assert result.argmax[0] == min(best[0], 17)
    assert (result.argmax == result.logits.argmax(axis=1)).all()
    without = product(
        Tensor(kind, (700, 256), bytes(raw)),
        Tensor.of(x),
        [0, 1, 2, 3],
        isa=isa,
        threads=threads,
        logits=False,
    )
    assert (without.argmax == result.argmax).all()


@pytest.mark.parametrize("isa", ISAS)
def test_all_logits_equal_or_zero(isa: str) -> None:
    zeros = Tensor.of(np.zeros((130, 64)))
    result = product(zeros, Tensor.of(np.ones((2, 64))), [0, 1], isa=isa, threads=3)
    assert (result.logits == 0).all()
    assert result.argmax.tolist() == [0, 0]
    negative = Tensor.of(-np.ones((130, 64)))
    result = product(negative, Tensor.of(np.ones((2, 64))), [0, 1], isa=isa, threads=3)
    assert (result.logits == -64).all()
    assert result.argmax.tolist() == [0, 0]


EXTREMES = {
    "zeros": np.zeros(64),
    "one value": np.eye(64)[5],
    "denormals": np.full(64, 3e-42),
    "below every scale": np.full(64, 1e-30),
    "around the smallest scale": np.geomspace(2.0**-62, 2.0**-52, 64),
    "powers of two": 2.0 ** (np.arange(64) % 13 - 6),
    "the edge of a scale": np.r_[
        np.full(32, 127.0), np.full(32, np.nextafter(np.float32(127), np.float32(128)))
    ],
    "halves": np.arange(64) % 7 + 0.5,
    "large": np.linspace(-1e6, 1e6, 64),
    "huge": np.geomspace(1e5, 1e18, 64) * (-1.0) ** np.arange(64),
    "outlier": np.r_[1e4, np.full(63, 1e-3)],
    "negative": -np.linspace(0.01, 3, 64),
}


@pytest.mark.parametrize(
    "kind",
    [
        TensorType.Q4_0,
        TensorType.Q4_1,
        TensorType.Q5_1,
        TensorType.Q8_0,
        TensorType.F32,
        TensorType.BF16,
    ],
)
def test_extreme_activations(kind: TensorType) -> None:
    x = np.stack([*EXTREMES.values()]).astype(np.float32)
    weights = Tensor.random(kind, (33, 64), np.random.default_rng(3))
    tokens = list(range(len(x)))
    results = [product(weights, Tensor.of(x), tokens, isa=isa) for isa in ISAS]
    for row, name in enumerate(EXTREMES):
        for result in results:
            one = Result(result.logits[row : row + 1], result.argmax[row : row + 1])
            check_close(one, weights, x[row : row + 1])
            assert (result.logits[row] == results[0].logits[row]).all(), name


@pytest.mark.parametrize("seed", range(20))
def test_bf16_of_any_size(seed: int) -> None:
    """From subnormal to where sums overflow; the AVX-512 instruction treats some sizes differently."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 0x6000, (48, 256)) | rng.integers(0, 2, (48, 256)) << 15  # below 2^65
    if seed % 2:  # about the least that is not zero, where sums are nearly subnormal
        patterns = (patterns & 0x807F) | (127 - 56 + rng.integers(-2, 3, patterns.shape)) << 7
    weights = Tensor(TensorType.BF16, patterns.shape, patterns.astype(np.uint16).tobytes())
    exponents = rng.integers(-59, -53, (9, 256)) if seed % 2 else rng.integers(-149, 50, (9, 256))
    x = np.ldexp(rng.uniform(-2, 2, exponents.shape), exponents).astype(np.float32)
    check_all_alike(weights, x)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_are_rounded_to_the_nearest_bf16(isa: str) -> None:
    """Ties to even; seen through an identity."""
    identity = Tensor.of(np.eye(64), TensorType.BF16)
    bits = np.random.default_rng(4).integers(0, 2**32, (MAX_ROWS, 64), dtype=np.uint32)
    bits[:, ::3] = bits[:, ::3] & 0xFFFF0000 | 0x8000
    x = bits.view(np.float32)
    x = np.where(np.abs(x) < 1e38, x, 1).astype(np.float32)
    result = product(identity, Tensor.of(x), list(range(MAX_ROWS)), isa=isa)
    assert (result.logits == seen_by(TensorType.BF16, x)).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FLOATING], ids=lambda k: k.name)
@pytest.mark.parametrize("scale", [0.0, 1e-6, 6e4], ids=["zero", "f16 denormal", "f16 largest"])
def test_extreme_scales_of_weights(kind: TensorType, scale: float) -> None:
    rng = np.random.default_rng(11)
    tensor = Tensor.random(kind, (16, 256), rng)
    blocks: NDArray[Any] = np.frombuffer(bytearray(tensor.raw), BLOCK_LAYOUT[kind])
    blocks["d"] = scale
    check_all_alike(Tensor(kind, tensor.shape, blocks.tobytes()), activations(rng, 5, 256))


@pytest.mark.parametrize(
    "kind", [TensorType.Q2_K, TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K], ids=lambda k: k.name
)
def test_zero_scales_within_a_block(kind: TensorType) -> None:
    """Exactly zero, not nearly: such a row of a head must tie with other zeros."""
    rng = np.random.default_rng(12)
    tensor = Tensor.random(kind, (16, 512), rng)
    blocks: NDArray[Any] = np.frombuffer(bytearray(tensor.raw), BLOCK_LAYOUT[kind])
    blocks["scales"][:, ::3] = 0
    check_all_alike(Tensor(kind, tensor.shape, blocks.tobytes()), activations(rng, 5, 512))
    blocks["scales"] = 0
    x = activations(rng, 5, 512)
    result = product(Tensor(kind, tensor.shape, blocks.tobytes()), Tensor.of(x), list(range(5)), isa=ISAS[0])
    assert (result.logits == 0).all()


def check_all_alike(weights: Tensor, x: Floats) -> None:
    results = [product(weights, Tensor.of(x), list(range(len(x))), isa=isa) for isa in ISAS]
    for result in results:
        check_close(result, weights, x)
        assert (result.logits == results[0].logits).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_weights_that_are_no_numbers_are_refused(kind: TensorType, value: float) -> None:
    tensor = Tensor.random(kind, (20, 512), np.random.default_rng(1))
    blocks: NDArray[Any] = np.frombuffer(bytearray(tensor.raw), BLOCK_LAYOUT[kind])
    for field in {"d", "m", "dmin", "x"} & set(blocks.dtype.names or ()):
        broken = blocks.copy()
        broken[field][-1] = np.float32(value).view(np.uint32) >> 16 if kind is TensorType.BF16 else value
        with pytest.raises(ValueError, match="infinite or not a number"):
            product(
                Tensor(kind, tensor.shape, broken.tobytes()), Tensor.of(np.ones((1, 512))), [0], isa=ISAS[0]
            )


def flush_denormals() -> None:
    """Switch this thread to flushing denormals to zero, as libraries built for fast mathematics do."""
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint32 * 16)()
    assert libm.fegetenv(environment) == 0
    environment[7] |= 0x8040  # MXCSR follows seven words of x87 state
    assert libm.fesetenv(environment) == 0


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="sets x86's MXCSR through glibc"
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_caller_that_flushes_denormals_gets_the_same_bits(threads: int) -> None:
    weights = Tensor.random(TensorType.F32, (40, 64), np.random.default_rng(2))
    table = Tensor.of(np.full((1, 64), 3e-40))
    expected = product(weights, table, [0], isa=ISAS[0])
    assert (expected.logits != 0).all()
    got: list[Result] = []

    def flushing() -> None:
        flush_denormals()
        got.append(product(weights, table, [0], isa=ISAS[0], threads=threads))

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert (got[0].logits.view(np.uint32) == expected.logits.view(np.uint32)).all()
