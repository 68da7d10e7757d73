"""safetensors files: what they hold is read as it is, and whatever the bytes, nothing worse than an error."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError
from paceline.weights.quants import TensorType, dequantize
from paceline.weights.safetensors import MAX_HEADER_BYTES, SafetensorsFile, write_safetensors
from support.folders import encoded, safetensors_bytes

_RNG = np.random.default_rng(3)
VALUES = {
    "F32": _RNG.standard_normal((3, 4)).astype(np.float32),
    "F16": _RNG.standard_normal((2, 2, 5)).astype(np.float32),
    "BF16": _RNG.standard_normal(7).astype(np.float32),
}
SOUND = safetensors_bytes({f"of {dtype}": encoded(values, dtype) for dtype, values in VALUES.items()})


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_values_of_every_type(tmp_path: Path) -> None:
    file = SafetensorsFile(written(tmp_path / "m.safetensors", SOUND))
    for dtype, values in VALUES.items():
        found = file.entries[f"of {dtype}"]
        assert (found.dtype, found.shape) == (dtype, values.shape)
        got = dequantize(TensorType[dtype], file.data(f"of {dtype}"), found.shape)
        if dtype == "F16":
            values = values.astype(np.float16).astype(np.float32)
        elif dtype == "BF16":
            assert np.abs(got - values).max() <= np.abs(values).max() / 256
            continue
        assert (got == values).all()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    arrays = {
        "marks": np.array([True, False, True]),
        "halves": VALUES["F16"].astype(np.float16).transpose(2, 0, 1),
        "ids": np.arange(5),
        "floats": VALUES["F32"],
    }
    write_safetensors(tmp_path / "m.safetensors", arrays)
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert list(file.entries) == ["ids", "floats", "halves", "marks"]  # larger items first: all are aligned
    assert [entry.dtype for entry in file.entries.values()] == ["I64", "F32", "F16", "BOOL"]
    for name, array in arrays.items():
        assert file.entries[name].offset % array.itemsize == 0
        np.testing.assert_array_equal(file.data(name).view(array.dtype).reshape(array.shape), array)


def test_an_empty_tensor_and_metadata_are_sound(tmp_path: Path) -> None:
    data = with_header({"__metadata__": {"format": "pt"}, "none": entry(shape=[0, 4], offsets=[0, 0])})
    file = SafetensorsFile(written(tmp_path / "m.safetensors", data))
    assert list(file.entries) == ["none"]
    assert file.data("none").size == 0


def test_an_array_at_an_odd_place_is_copied(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    data = with_header({"a": entry(shape=[4], offsets=[0, 16])} | {"__metadata__": {}}, values.tobytes())
    assert (len(data) - 16) % 4, "the header happens to be aligned"
    file = SafetensorsFile(written(tmp_path / "m.safetensors", data))
    assert (file.data("a").view(np.float32) == values).all()


def test_data_outlives_the_file(tmp_path: Path) -> None:
    file = SafetensorsFile(written(tmp_path / "m.safetensors", SOUND))
    data = file.data("of F32")
    file.release("of F32")
    file.close()
    assert (data.view(np.float32).reshape(3, 4) == VALUES["F32"]).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"1234", "4 bytes are no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer, not the weights themselves"),
        (struct.pack("<Q", 99) + b"{}", "a header of 99 bytes is announced, 2 follow"),
        (struct.pack("<Q", 2**63) + b"{}", f"bytes is announced, the limit is {MAX_HEADER_BYTES}"),
        (with_header(b"{"), "the header is not JSON"),
        (with_header(b"[" * 100000), "the header is not JSON"),
        (with_header(b'{"a": 1' + b"0" * 5000 + b"}"), "the header is not JSON"),
        (with_header(b"\xff\xfe"), "the header is not UTF-8"),
        (with_header([]), "the header is not a JSON object"),
        (with_header({"a": 1}), "tensor 'a' is not described by dtype, shape and data_offsets"),
        (with_header({"a": {"dtype": "F32", "shape": [1]}}), "is not described by"),
        (with_header({"a" * 300: entry()}), "a name of 300 characters, the limit is 256"),
        (with_header({"a": entry(shape=[-1])}, b"1234"), r"tensor 'a' has the shape \[-1\]"),
        (with_header({"a": entry(shape=[True])}, b"1234"), r"has the shape \[True\]"),
        (with_header({"a": entry(shape=[1.0])}, b"1234"), r"has the shape \[1.0\]"),
        (with_header({"a": entry(shape=[1] * 9)}, b"1234"), "has the shape"),
        (with_header({"a": entry(shape=[2**62, 2**62])}, b"1234"), "tensor 'a' takes"),
        (with_header({"a": entry(offsets=[0, 8])}, b"12345678"), "tensor 'a' takes 4 bytes, not those from"),
        (with_header({"a": entry(offsets=[4, 0])}, b"1234"), "takes 4 bytes, not those from 4 to 0"),
        (with_header({"a": entry(offsets=[0])}, b"1234"), r"tensor 'a' lies at \[0\]"),
        (with_header({"a": entry(offsets="no")}, b"1234"), "tensor 'a' lies at no"),
        (with_header({"a": entry()}, b"12"), "tensor 'a' ends at byte"),
        (with_header({"a": entry()}, b"123456"), "2 bytes at the end belong to no tensor"),
        (with_header({"a": entry(offsets=[2, 6])}, b"123456"), "2 bytes before tensor 'a' belong to none"),
        (
            with_header({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456"),
            "tensor 'b' overlaps tensor 'a'",
        ),
        (
            with_header(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
            "'a' occurs twice in the header",
        ),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        SafetensorsFile(written(tmp_path / "m.safetensors", data))
    assert caught.value.hint


@pytest.mark.parametrize("dtype", ["F4", "C64", 7, None])
def test_an_unknown_dtype_is_named(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tensor 'a' has dtype {dtype}"):
        SafetensorsFile(written(tmp_path / "m.safetensors", with_header({"a": entry(dtype=dtype)}, b"1234")))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(ModelFileError, match="is a directory"):
        SafetensorsFile(tmp_path)


# Whatever the bytes

_HEADER = len(SOUND) - sum(v.size * (4 if d == "F32" else 2) for d, v in VALUES.items())
_edits = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, _HEADER), st.binary(min_size=1, max_size=6)),
        st.tuples(
            st.just("insert"), st.integers(0, _HEADER), st.sampled_from([b"0", b"9", b"-", b"[", b"}"])
        ),
        st.tuples(st.just("cut"), st.integers(0, len(SOUND)), st.just(b"")),
    ),
    min_size=1,
    max_size=4,
)


def edited(edits: list[tuple[str, int, bytes]]) -> bytes:
    change: dict[str, Callable[[bytes, int, bytes], bytes]] = {
        "put": lambda data, at, raw: data[:at] + raw + data[at + len(raw) :],
        "insert": lambda data, at, raw: data[:at] + raw + data[at:],
        "cut": lambda data, at, raw: data[:at],
    }
    data = SOUND
    for kind, at, raw in edits:
        data = change[kind](data, at, raw)
    return data


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.safetensors"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_edits)
def test_any_damage_gives_a_sound_file_or_an_error(place: Path, edits: list[tuple[str, int, bytes]]) -> None:
    data = edited(edits)
    place.write_bytes(data)
    hint = "none needed"
    tracemalloc.start()
    try:
        file = SafetensorsFile(place)
        end = 0
        for found in file.entries.values():
            assert end <= found.offset <= found.offset + found.nbytes <= len(data)
            end = found.offset + found.nbytes
            assert file.data(found.name).size == found.nbytes
    except PacelineError as error:
        hint = error.hint
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert hint
    assert peak < 4 << 20
