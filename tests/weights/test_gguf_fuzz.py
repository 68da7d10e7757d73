"""Whatever the bytes, opening a file gives a sound model or an error for the user, in bounded memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ModelFileError, PacelineError
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType, dequantize
from support.gguf_writer import Tensor, gguf_bytes

Edit = Callable[[bytes], bytes]

_RNG = np.random.default_rng(5)
_SOUND = gguf_bytes(
    {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "flag": True,
        "tokenizer.ggml.tokens": ["<s>", "Ġthe", "日本", ""],
        "tokenizer.ggml.scores": [0.5, -1.0],
        "tokenizer.ggml.token_type": [3, 1, 1, 6],
        "nested": [[["a"]], [["b"], ["c"]]],
        "split.count": np.uint16(1),
    },
    {
        "token_embd.weight": Tensor.random(TensorType.Q4_0, (4, 32), _RNG),
        "output_norm.weight": Tensor.of(np.ones(32)),
        "blk.0.attn_q.weight": Tensor.random(TensorType.Q6_K, (2, 256), _RNG),
    },
)
_DATA_START = len(_SOUND) - 512

_EXTREMES = [
    0,
    1,
    2,
    3,
    8,
    9,
    31,
    255,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]


def _overwrite(at: int, raw: bytes) -> Edit:
    return lambda data: data[:at] + raw + data[at + len(raw) :]


def _insert(at: int, raw: bytes) -> Edit:
    return lambda data: data[:at] + raw + data[at:]


def _drop(at: int, count: int) -> Edit:
    return lambda data: data[:at] + data[at + count :]


def _cut(at: int) -> Edit:
    return lambda data: data[:at]


_places = st.integers(0, len(_SOUND))
_header_places = st.integers(4, _DATA_START)
_edits = st.one_of(
    st.builds(_overwrite, _header_places, st.binary(min_size=1, max_size=4)),
    st.builds(_overwrite, _header_places, st.sampled_from(_EXTREMES).map(lambda n: struct.pack("<Q", n))),
    st.builds(
        _overwrite, _header_places, st.sampled_from(_EXTREMES[:11]).map(lambda n: struct.pack("<I", n))
    ),
    st.builds(_insert, _header_places, st.binary(min_size=1, max_size=32)),
    st.builds(_drop, _header_places, st.integers(1, 64)),
    st.builds(_cut, _places),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def open_and_touch(path: Path) -> str:
    """Open a file and read every tensor; return the kind of error, or "sound"."""
    size = path.stat().st_size
    try:
        with GGUFFile.open(path) as file:
            end = 0
            for info in sorted(file.tensors.values(), key=lambda info: info.offset):
                assert end <= info.offset <= info.offset + info.nbytes <= size
                end = info.offset + info.nbytes
                values = dequantize(info.type, file.data(info.name), info.shape)
                assert values.shape == info.shape
    except PacelineError as error:
        return type(error).__name__ if error.hint else "an error without a next step"
    return "sound"


def open_within(path: Path, limit: int) -> str:
    tracemalloc.start()
    try:
        outcome = open_and_touch(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= limit
    return outcome


def test_the_file_that_is_mutated_is_sound(path: Path) -> None:
    path.write_bytes(_SOUND)
    assert open_within(path, 1 << 18) == "sound"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(_edits, min_size=1, max_size=4))
def test_mutations_never_do_worse_than_an_error(path: Path, edits: list[Edit]) -> None:
    data = _SOUND
    for edit in edits:
        data = edit(data)
    path.write_bytes(data)
    assert open_within(path, 1 << 19) in {"sound", "ModelFileError", "UnsupportedModelError"}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.tuples(st.integers(0, 3), st.integers(0, 3)), rest=st.binary(max_size=400))
def test_noise_behind_a_good_start(path: Path, counts: tuple[int, int], rest: bytes) -> None:
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, *counts) + rest)
    assert open_within(path, 1 << 19) in {"sound", "ModelFileError", "UnsupportedModelError"}


def test_every_truncation_is_a_damaged_file(path: Path) -> None:
    for size in range(len(_SOUND)):
        path.write_bytes(_SOUND[:size])
        assert open_and_touch(path) == "ModelFileError", size


def test_every_single_byte_of_the_header_may_be_anything(path: Path) -> None:
    for at in range(_DATA_START):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(_SOUND[:at] + bytes([value]) + _SOUND[at + 1 :])
            assert open_and_touch(path) in {"sound", "ModelFileError", "UnsupportedModelError"}


# Files large enough that every announced count has room


def _key(kind: int, raw: bytes) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", kind) + raw


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (_key(8, struct.pack("<Q", 1 << 34)), "header is longer"),
        (_key(9, struct.pack("<IQ", 0, 1 << 26)), "67108864 elements of 'k' announced, the limit is"),
        (_key(9, struct.pack("<IQ", 8, 1 << 23)), "8388608 elements of 'k' announced, the limit is"),
        (_key(9, struct.pack("<IQ", 9, 1 << 23)), "8388608 elements of 'k' announced, the limit is"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 21, 0), "2097152 tensors announced, the limit is"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 20), "1048576 metadata keys announced, the limit is"),
    ],
    ids=["string", "numbers", "strings", "arrays", "tensors", "keys"],
)
def test_a_huge_file_buys_no_memory(path: Path, start: bytes, named: str) -> None:
    path.write_bytes(start)
    os.truncate(path, 1 << 36)
    tracemalloc.start()
    with pytest.raises(ModelFileError, match=named):
        GGUFFile.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 18


@pytest.mark.parametrize(
    ("kind", "element"),
    [
        (1, b"\x80"),
        (2, b"\xff\xff"),
        (4, b"\xff\xff\xff\xff"),
        (7, b"\x01"),
        (8, struct.pack("<Q2s", 2, b"ab")),
        (9, struct.pack("<IQ", 0, 0)),
    ],
    ids=["int8", "uint16", "uint32", "bool", "string", "array"],
)
def test_the_dearest_elements_cost_a_bounded_multiple_of_their_count(
    path: Path, kind: int, element: bytes
) -> None:
    count = 50_000
    path.write_bytes(_key(9, struct.pack("<IQ", kind, count) + element * count))
    # At MAX_ARRAY_ELEMENTS this bound is 480 MiB, for a file that is itself large.
    assert open_within(path, 120 * count + (1 << 18)) == "sound"
