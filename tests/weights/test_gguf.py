"""The GGUF reader on sound files, on files that are no model, and on files made to hurt."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from paceline.errors import ModelFileError, PacelineError, ResourceError, UnsupportedModelError
from paceline.weights import gguf as reader
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType, dequantize
from support.gguf_writer import Tensor, gguf_bytes, write_gguf
from support.privileges import without_privileges

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "t.u8": np.uint8(255),
    "t.i8": np.int8(-128),
    "t.u16": np.uint16(65535),
    "t.i16": np.int16(-32768),
    "t.u32": 4294967295,
    "t.i32": -5,
    "t.f32": 0.5,
    "t.f64": np.float64(0.1),
    "t.u64": 2**64 - 1,
    "t.i64": -(2**63),
    "t.yes": True,
    "t.no": False,
    "t.text": "née 😀\n",
    "t.empty": "",
    "a.u8": np.array([1, 2, 250], np.uint8),
    "a.i32": [-1, 0, 7],
    "a.f32": [0.25, -1.5],
    "a.bool": [True, False],
    "a.text": ["", "Ġhello", "日本"],
    "a.none": [],
}


def tensors() -> dict[str, Tensor]:
    rng = np.random.default_rng(3)
    made = {f"w.{kind.name}": Tensor.random(kind, (3, kind.block_size), rng) for kind in TensorType}
    return {"first": Tensor.of(np.arange(24).reshape(2, 3, 4)), **made}


def opened(path: Path, raw: bytes) -> GGUFFile:
    path.write_bytes(raw)
    return GGUFFile.open(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("alignment", [32, 64, 1])
def test_what_was_written_is_read(path: Path, alignment: int) -> None:
    with opened(path, gguf_bytes(METADATA, tensors(), alignment=alignment)) as file:
        extra = {} if alignment == 32 else {"general.alignment": alignment}
        assert file.metadata == {
            key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
            for key, value in (METADATA | extra).items()
        }
        assert list(file.tensors) == list(tensors())
        for name, tensor in tensors().items():
            info = file.tensors[name]
            assert (info.name, info.shape, info.type, info.nbytes) == (
                name,
                tensor.shape,
                tensor.type,
                len(tensor.raw),
            )
            assert info.offset % alignment == 0
            assert file.data(name).tobytes() == tensor.raw


def test_nested_arrays_become_nested_lists(path: Path) -> None:
    nested = [[["a"], ["b", "c"]], [["d"]]]
    assert opened(path, gguf_bytes({"n": nested}, {})).metadata == {"n": nested}


def test_version_2_reads_like_version_3(path: Path) -> None:
    two = opened(path, gguf_bytes(METADATA, tensors(), version=2))
    three = opened(path.with_name("three"), gguf_bytes(METADATA, tensors()))
    assert two.metadata == three.metadata
    assert two.tensors == three.tensors


def test_the_gguf_package_reads_the_same(path: Path) -> None:
    """Both directions hang on it: the writer that other tests use, and the reader."""
    write_gguf(path, METADATA, tensors())
    theirs = gguf.GGUFReader(path)
    ours = GGUFFile.open(path)
    for key, value in ours.metadata.items():
        if value != []:  # the package cannot show an empty array
            assert theirs.fields[key].contents() == value
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == info.shape
        assert (tensor.tensor_type.value, tensor.data_offset, tensor.n_bytes) == (
            info.type,
            info.offset,
            info.nbytes,
        )
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
        np.testing.assert_array_equal(dequantize(info.type, ours.data(tensor.name), info.shape), expected)


def test_a_file_by_the_gguf_package_is_read(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([-1.0, 0.5])
    writer.add_token_types([1, 3])
    values = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.metadata == {
        "general.architecture": "qwen2",
        "qwen2.block_count": 2,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.scores": [-1.0, 0.5],
        "tokenizer.ggml.token_type": [1, 3],
    }
    assert file.tensors["w"].shape == (2, 64)
    assert file.data("w").tobytes() == packed.tobytes()


def test_data_is_a_read_only_view_that_outlives_close(path: Path) -> None:
    with opened(path, gguf_bytes({}, tensors())) as file:
        view = file.data("first")
        assert not view.flags.writeable
        assert not view.flags.owndata
    np.testing.assert_array_equal(view.view(np.float32), np.arange(24, dtype=np.float32))


def test_a_vocabulary_alone_needs_no_tensors(path: Path) -> None:
    file = opened(path, gguf_bytes({"k": "v"}, {}))
    assert (file.metadata, file.tensors) == ({"k": "v"}, {})


# Files that are no model


def refusal(path: Path, kind: type[PacelineError]) -> str:
    with pytest.raises(kind) as caught:
        GGUFFile.open(path)
    assert type(caught.value) is kind
    assert caught.value.hint
    assert str(path) in caught.value.message
    return caught.value.message


def test_missing_directory_empty_and_pipe(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing.gguf", ModelFileError)
    assert "is a directory" in refusal(tmp_path, ModelFileError)
    (tmp_path / "empty").touch()
    assert "is empty" in refusal(tmp_path / "empty", ModelFileError)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe", ModelFileError)
    assert "does not exist" in refusal(tmp_path / "empty" / "below", ModelFileError)
    assert "too long" in refusal(tmp_path / ("x" * 300), ResourceError)


def test_unreadable_file(path: Path) -> None:
    write_gguf(path, {}, {})
    path.chmod(0)
    with without_privileges():
        assert "permission denied" in refusal(path, ModelFileError)


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (b"\x80\x00\x00\x00\x00\x00\x00\x00{", "b'\\x80"),
        (b"FUGG", "big-endian"),
        (b"lmgg", "older than GGUF"),
        (b"PK\x03\x04", "zip archive"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
        (b"<!DOCTYPE html>", "a web page"),
        (b"G", "b'G'"),
    ],
)
def test_other_formats_are_named(path: Path, start: bytes, named: str) -> None:
    path.write_bytes(start)
    assert named in refusal(path, ModelFileError)


# Sound files that are not supported


@pytest.mark.parametrize(
    ("version", "named"),
    [
        (struct.pack("<I", 1), "version 1"),
        (struct.pack("<I", 4), "version 4"),
        (struct.pack(">I", 3), "big-endian"),
    ],
)
def test_other_versions_are_refused_by_name(path: Path, version: bytes, named: str) -> None:
    path.write_bytes(b"GGUF" + version + bytes(64))
    assert named in refusal(path, UnsupportedModelError)


def test_split_models_are_refused_by_name(path: Path) -> None:
    write_gguf(path, {"split.no": np.uint16(0), "split.count": np.uint16(3)}, tensors())
    assert "split over 3 files" in refusal(path, UnsupportedModelError)
    write_gguf(path, {"split.no": np.uint16(0), "split.count": np.uint16(1)}, tensors())
    assert "first" in GGUFFile.open(path).tensors


@pytest.mark.parametrize(
    ("number", "name"), [(16, "IQ2_XXS"), (35, "TQ2_0"), (4, "4"), (2**32 - 1, "4294967295")]
)
def test_unknown_tensor_types_are_refused_with_the_tensor(path: Path, number: int, name: str) -> None:
    path.write_bytes(entry_file(kind=number))
    assert refusal(path, UnsupportedModelError) == f"{path}: tensor 'w' has type {name}"


# Files made to hurt


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def head(tensor_count: int, key_count: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensor_count, key_count)


def pair(key: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def entry(
    name: str = "w", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, n_dims: int | None = None
) -> bytes:
    n_dims = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, kind, offset)


def entry_file(data: int = 256, **fields: Any) -> bytes:
    raw = head(1, 0) + entry(**fields)
    return raw + bytes(-len(raw) % 32 + data)


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def nested(depth: int) -> bytes:
    return array(9, 1) * (depth - 1) + array(0, 1, b"\x07")


def two_tensors(first: int, second: int) -> bytes:
    raw = head(2, 0) + entry("a", offset=first) + entry("b", offset=second)
    return raw + bytes(-len(raw) % 32 + 512)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "only the magic": (b"GGUF", "past the end of the file at byte 4"),
    "no counts": (b"GGUF\x03\0\0\0", "past the end"),
    "2^63 tensors": (head(1 << 63, 0) + bytes(64), "9223372036854775808 tensors announced where at most"),
    "2^64-1 keys": (head(0, 2**64 - 1) + bytes(64), "18446744073709551615 metadata keys announced"),
    "one tensor more than there is": (head(2, 0) + entry(dims=(8,)) + text("v" * 24), "past the end"),
    "key length 2^63": (head(0, 1) + struct.pack("<Q", 1 << 63) + bytes(64), "past the end"),
    "key length 2^64-1": (head(0, 1) + struct.pack("<Q", 2**64 - 1) + bytes(64), "past the end"),
    "key too long": (
        head(0, 1) + pair("k" * 300, 0, b"\0"),
        "metadata key of 300 characters, the limit is 256",
    ),
    "key not UTF-8": (head(0, 1) + pair(b"\xff\xfe", 0, b"\0"), "metadata key, string 0, is not UTF-8"),
    "value not UTF-8": (
        head(0, 1) + pair("k", 8, text(b"ab\xc3")),
        "'k', string 0, is not UTF-8: unexpected end",
    ),
    "a string of many not UTF-8": (
        head(0, 1) + pair("k", 9, array(8, 2, text("ok") + text(b"\x80"))),
        "'k', string 1, is not UTF-8: invalid start byte at byte",
    ),
    "surrogates": (head(0, 1) + pair("k", 8, text(b"\xed\xa0\x80")), "is not UTF-8"),
    "key twice": (head(0, 2) + pair("k", 0, b"\0") * 2, "metadata key 'k' occurs twice"),
    "unknown value type": (head(0, 1) + pair("k", 13, bytes(64)), "'k': unknown value type 13"),
    "unknown element type": (head(0, 1) + pair("k", 9, array(99, 0)), "'k': array of unknown value type 99"),
    "boolean 2": (head(0, 1) + pair("k", 7, b"\x02"), "'k': boolean of value 2"),
    "boolean 255 in an array": (head(0, 1) + pair("k", 9, array(7, 2, b"\x01\xff")), "boolean of value 255"),
    "array of 2^63": (
        head(0, 1) + pair("k", 9, array(0, 1 << 63, bytes(64))),
        "9223372036854775808 elements of 'k' announced where at most 64 fit",
    ),
    "array one too long": (head(0, 1) + pair("k", 9, array(10, 2, bytes(15))), "2 elements of 'k' announced"),
    "strings one too many": (head(0, 1) + pair("k", 9, array(8, 2, text("12345678"))), "past the end"),
    "arrays too deep": (head(0, 1) + pair("k", 9, nested(5)), "'k': arrays nested deeper than 4"),
    "value cut": (head(0, 1) + pair("k", 10, bytes(7)), "past the end"),
    "alignment 0": (head(0, 1) + pair("general.alignment", 4, bytes(4)), "general.alignment is 0"),
    "alignment 24": (
        head(0, 1) + pair("general.alignment", 4, struct.pack("<I", 24)),
        "is 24; it must be a power",
    ),
    "alignment 2^31": (head(0, 1) + pair("general.alignment", 4, struct.pack("<I", 1 << 31)), "2147483648"),
    "alignment a string": (
        head(0, 1) + pair("general.alignment", 8, text("32")),
        "general.alignment is '32'",
    ),
    "alignment true": (head(0, 1) + pair("general.alignment", 7, b"\1"), "general.alignment is True"),
    "no dimensions": (entry_file(dims=()), "tensor 'w' has 0 dimensions"),
    "five dimensions": (entry_file(dims=(1,) * 5), "tensor 'w' has 5 dimensions; 1 to 4 are allowed"),
    "2^32-1 dimensions": (entry_file(n_dims=2**32 - 1), "4294967295 dimensions"),
    "dimension 0": (entry_file(dims=(32, 0)), "tensor 'w' of shape (0, 32) has no elements"),
    "product overflows to 0": (
        entry_file(dims=(1 << 32, 1 << 32)),
        "tensor 'w' takes 73786976294838206464 bytes",
    ),
    "product overflows to little": (
        entry_file(dims=(2**63 + 16, 2)),
        "tensor 'w' takes 73786976294838206592 bytes, the file has",
    ),
    "half a block": (
        entry_file(dims=(48, 2), kind=2),
        "rows of 48 elements, no multiple of Q4_0's block of 32",
    ),
    "offset not aligned": (entry_file(offset=8), "tensor 'w' at offset 8 is not aligned to 32 bytes"),
    "offset past the end": (entry_file(offset=160), "tensor 'w' ends at byte 352, the file has 320"),
    "offset 2^64-32": (entry_file(offset=2**64 - 32), "tensor 'w' ends at byte 18446744073709551776"),
    "data cut": (entry_file(data=127), "tensor 'w' ends at byte 192, the file has 191"),
    "data missing": (head(1, 0) + entry(), "the file has"),
    "same place": (two_tensors(0, 0), "tensor 'b' overlaps tensor 'a'"),
    "overlap out of order": (two_tensors(96, 0), "tensor 'a' overlaps tensor 'b'"),
    "tensor twice": (head(2, 0) + entry() + entry(offset=128) + bytes(512), "tensor 'w' occurs twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_name_what_is_wrong(path: Path, case: str) -> None:
    raw, named = HOSTILE[case]
    path.write_bytes(raw)
    assert named in refusal(path, ModelFileError)


def test_neighbours_and_gaps_are_no_overlap(path: Path) -> None:
    assert opened(path, two_tensors(128, 0)).tensors.keys() == {"a", "b"}
    assert opened(path, two_tensors(0, 256)).tensors["b"].offset % 32 == 0


def test_depth_of_four_is_read(path: Path) -> None:
    assert opened(path, head(0, 1) + pair("k", 9, nested(4))).metadata == {"k": [[[[7]]]]}


LIMITS: dict[str, tuple[str, int, Callable[[], bytes], str]] = {
    "keys": (
        "MAX_KEYS",
        3,
        lambda: gguf_bytes({str(i): i for i in range(4)}, {}),
        "4 metadata keys announced",
    ),
    "tensors": (
        "MAX_TENSORS",
        3,
        lambda: gguf_bytes({}, {str(i): Tensor.of(np.ones(8)) for i in range(4)}),
        "4 tensors announced, the limit is 3",
    ),
    "elements over all arrays": (
        "MAX_ARRAY_ELEMENTS",
        9,
        lambda: gguf_bytes({"a": list(range(6)), "b": ["x"] * 4}, {}),
        "4 elements of 'b' announced, the limit is 3",
    ),
    "header": (
        "MAX_HEADER_BYTES",
        90,
        lambda: gguf_bytes({"a": "x" * 100}, {}),
        "header is longer than 90 bytes",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits_hold_whatever_the_file_has_room_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, limit, build, named = LIMITS[case]
    path.write_bytes(build())
    GGUFFile.open(path)
    monkeypatch.setattr(reader, name, limit)
    assert named in refusal(path, ModelFileError)


def test_names_in_messages_cannot_drive_a_terminal(path: Path) -> None:
    path.write_bytes(entry_file(name="\x1b[2Jw", offset=8))
    assert "tensor '\\x1b[2Jw' at offset 8" in refusal(path, ModelFileError)


# The real model

# By the gguf package 0.19.0: the first values of the first row, the last values of the last row.
RECORDED_EMBEDDING = [-0.10654449462890625, 0.032978057861328125, 0.048198699951171875, -0.022830963134765625]
RECORDED_FFN = [0.056640625, 0.203125, -0.08984375, 0.056640625]


def test_the_demo_model_is_read_as_recorded(smollm2_path: Path) -> None:
    with GGUFFile.open(smollm2_path) as file:
        meta = file.metadata
        assert meta["general.architecture"] == "llama"
        assert meta["llama.block_count"] == 30
        assert meta["tokenizer.ggml.pre"] == "smollm"
        assert len(meta["tokenizer.ggml.tokens"]) == 49152
        assert meta["tokenizer.ggml.tokens"][1:3] == ["<|im_start|>", "<|im_end|>"]
        assert len(file.tensors) == 272
        last = max(file.tensors.values(), key=lambda info: info.offset)
        assert last.offset + last.nbytes == smollm2_path.stat().st_size
        info = file.tensors["token_embd.weight"]
        assert (info.shape, info.type) == ((49152, 576), TensorType.Q8_0)
        row = dequantize(info.type, file.data(info.name)[: info.type.nbytes(576)], (576,))
        assert row[:4].tolist() == RECORDED_EMBEDDING
        info = file.tensors["blk.29.ffn_down.weight"]
        assert (info.shape, info.type) == ((576, 1536), TensorType.Q4_1)
        values = dequantize(info.type, file.data(info.name), info.shape)
        assert values[575, -4:].tolist() == RECORDED_FFN
