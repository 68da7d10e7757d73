"""Block geometry and values, against ggml's own Python package and by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.weights import quants
from paceline.weights.quants import TensorType, dequantize

KINDS = list(TensorType)


def reference(kind: TensorType, raw: np.ndarray, cols: int) -> np.ndarray:
    rows = raw.reshape(-1, kind.nbytes(cols))
    with np.errstate(all="ignore"):
        return gguf.dequantize(rows, gguf.GGMLQuantizationType(kind.value))


@pytest.mark.parametrize("kind", KINDS)
def test_geometry_and_id_are_ggmls(kind: TensorType) -> None:
    theirs = gguf.GGMLQuantizationType[kind.name]
    assert theirs.value == kind.value
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_size, kind.type_size)


def test_every_other_ggml_type_is_known_by_name() -> None:
    ours = {kind.value: kind.name for kind in TensorType} | quants.UNSUPPORTED_NAMES
    assert ours == {kind.value: kind.name for kind in gguf.GGMLQuantizationType}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_blocks_widen_to_the_same_bits(kind: TensorType, seed: int) -> None:
    cols = 2 * kind.block_size
    raw = np.random.default_rng(seed).integers(0, 256, kind.nbytes(17 * cols), dtype=np.uint8)
    ours = dequantize(kind, raw, (17, cols))
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, reference(kind, raw, cols))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.block_size > 1])
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, -6e-5, 1.0, 65504.0, np.inf, np.nan])
def test_extreme_scales_widen_to_the_same_bits(kind: TensorType, scale: float) -> None:
    raw = np.random.default_rng(7).integers(0, 256, kind.nbytes(4 * kind.block_size), dtype=np.uint8)
    blocks = raw.view(quants.BLOCK_LAYOUT[kind])
    for name in {"d", "dmin", "m"} & set(blocks.dtype.names or ()):
        blocks[name] = scale
    ours = dequantize(kind, raw, (4, kind.block_size))
    expected = reference(kind, raw, kind.block_size)
    np.testing.assert_array_equal(ours, expected)
    real = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours[real]), np.signbit(expected[real]))


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(1).integers(0, 256, TensorType.Q6_K.nbytes(256 * 30), dtype=np.uint8)
    whole = dequantize(TensorType.Q6_K, raw, (10, 768))
    monkeypatch.setattr(quants, "_CHUNK_ELEMENTS", 256 * 7)
    np.testing.assert_array_equal(whole, dequantize(TensorType.Q6_K, raw, (10, 768)))


def test_q4_0_by_hand() -> None:
    raw = np.zeros(18, dtype=np.uint8)
    raw[:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    raw[2] = 0xF1  # element 0 is 1, element 16 is 15
    expected = np.full(32, -4.0, dtype=np.float32)
    expected[0], expected[16] = (1 - 8) * 0.5, (15 - 8) * 0.5
    np.testing.assert_array_equal(dequantize(TensorType.Q4_0, raw, (32,)), expected)


def test_three_dimensional_shapes_and_empty_tensors_keep_their_shape() -> None:
    raw = np.arange(24, dtype=np.float32).view(np.uint8)
    np.testing.assert_array_equal(
        dequantize(TensorType.F32, raw, (2, 3, 4)), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    )
    assert dequantize(TensorType.Q8_0, np.zeros(0, np.uint8), (0, 32)).shape == (0, 32)
