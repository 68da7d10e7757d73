"""Rounding to 8 and 4 bits: exact where the levels are, better than the usual rule elsewhere."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.weights.quantize import quantize
from paceline.weights.quants import BLOCK_LAYOUT, TensorType, dequantize
from support.gguf_writer import Tensor

Array = NDArray[np.float32]
KINDS = [TensorType.Q8_0, TensorType.Q4_0]


def rounded(values: Array, kind: TensorType) -> Array:
    rows, cols = values.shape
    raw = quantize("w", rows, cols, lambda start, end: values[start:end], kind)
    assert raw.size == kind.nbytes(values.size)
    return dequantize(kind, raw, values.shape)


def plain_q4(values: Array) -> Array:
    """Q4_0 by its usual rule: the value of largest magnitude becomes level -8."""
    groups = values.reshape(-1, 32)
    peak = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    scale = (peak / -8).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint(groups / scale), -8, 7) * scale).reshape(values.shape)


def test_values_worked_out_by_hand() -> None:
    row = np.zeros((1, 32), np.float32)
    row[0, :4] = [127.0, -63.5, 0.4, 1.0]
    assert rounded(row, TensorType.Q8_0)[0, :4].tolist() == [127.0, -64.0, 0.0, 1.0]
    row[0, :4] = [-8.0, 7.0, 3.0, 0.0]
    assert rounded(row, TensorType.Q4_0)[0, :4].tolist() == [-8.0, 7.0, 3.0, 0.0]
    row[0, :4] = [8.0, -7.0, -3.0, 0.0]
    assert rounded(row, TensorType.Q4_0)[0, :4].tolist() == [8.0, -7.0, -3.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: TensorType) -> None:
    assert (rounded(np.zeros((3, 64), np.float32), kind) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_the_same_type_are_kept(kind: TensorType) -> None:
    """What such a file holds, dequantised, comes back as it was, where all its levels are used."""
    tensor = Tensor.random(kind, (40, 256), np.random.default_rng(1))
    blocks = np.frombuffer(tensor.raw, BLOCK_LAYOUT[kind]).copy()
    if kind is TensorType.Q8_0:
        blocks["qs"] = np.maximum(blocks["qs"], -127)
        blocks["qs"][:, 0] = 127
    else:
        blocks["qs"][:, 0] &= 0xF0  # level -8
    values = dequantize(kind, blocks.view(np.uint8), tensor.shape)
    assert (rounded(values, kind) == values).all()


def test_eight_bits_are_within_half_a_step() -> None:
    values = np.random.default_rng(2).standard_normal((50, 320)).astype(np.float32)
    steps = np.abs(values.reshape(-1, 32)).max(axis=1) / 127
    error = np.abs(rounded(values, TensorType.Q8_0) - values).reshape(-1, 32).max(axis=1)
    # The scale itself is rounded to half precision, which moves the largest value by up to 127 / 2048 steps.
    assert (error <= steps * (0.5 + 127 / 2048)).all()


@pytest.mark.parametrize("tail", [0.0, 0.3])
def test_four_bits_lose_a_tenth_less_than_by_the_usual_rule(tail: float) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((200, 512)).astype(np.float32)
    values *= np.exp(tail * rng.standard_normal(values.shape)).astype(np.float32)
    found = ((rounded(values, TensorType.Q4_0) - values) ** 2).reshape(-1, 32).sum(axis=1)
    usual = ((plain_q4(values) - values) ** 2).reshape(-1, 32).sum(axis=1)
    assert found.sum() < 0.9 * usual.sum()
    # Of single groups too, but for the last rounding of the scale.
    assert (found <= usual * 1.02 + 1e-6).mean() > 0.99


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32),
    st.sampled_from(KINDS),
    st.integers(-8, 0),
)
def test_no_error_beyond_a_step(values: list[float], kind: TensorType, exponent: int) -> None:
    row = np.array([values], np.float32) * np.float32(2.0**exponent)
    largest = np.abs(row).max()
    steps = {TensorType.Q8_0: 127.0, TensorType.Q4_0: 6.0}[kind]
    # Scales below half precision's smallest step lose the whole value; nothing more.
    assert np.abs(rounded(row, kind) - row).max() <= largest / steps + steps * 2.0**-24


def test_rows_do_not_depend_on_how_they_are_read() -> None:
    values = np.random.default_rng(4).standard_normal((5000, 96)).astype(np.float32)
    whole = rounded(values, TensorType.Q4_0)
    for start in (0, 681, 682, 683, 4999):
        assert (rounded(values[start : start + 1], TensorType.Q4_0) == whole[start]).all()


def test_memory_stays_near_the_result() -> None:
    rows, cols = 4096, 4096
    row = np.random.default_rng(5).standard_normal(cols).astype(np.float32)
    tracemalloc.start()
    try:
        raw = quantize("w", rows, cols, lambda start, end: np.tile(row, (end - start, 1)), TensorType.Q4_0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < raw.nbytes + (32 << 20)
