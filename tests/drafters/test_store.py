"""The history of responses: bounds, and a file that may be anything."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.drafters import shared_file
from paceline.drafters.store import SEPARATOR, ResponseStore
from paceline.errors import ResourceError, UsageError


def make(
    file: Path | None = None, *, limit: int = 100, vocab: int = 1000, identity: str = "model-a"
) -> ResponseStore:
    return ResponseStore(limit, vocab_size=vocab, identity=identity, file=file)


def saved(file: Path, *responses: list[int]) -> Path:
    store = make(file)
    for response in responses:
        store.add(response)
    store.save()
    return file


def test_keeps_whole_newest_responses_within_its_bound():
    store = make(limit=10)
    for i in range(40):
        store.add([i * 10 + 1, i * 10 + 2])
        assert len(store) <= 10
    assert store.tokens[-3:] == [391, 392, SEPARATOR]
    assert store.tokens[0] != SEPARATOR


def test_of_a_response_longer_than_the_bound_the_end_is_kept():
    store = make(limit=10)
    store.add(list(range(30)))
    assert store.tokens == [*range(26, 30), SEPARATOR]


def test_a_bound_of_zero_keeps_nothing(tmp_path):
    store = make(tmp_path / "r", limit=0)
    store.add([1, 2, 3])
    store.save()
    assert len(store) == 0
    assert not (tmp_path / "r").exists()


def test_a_negative_bound_is_refused():
    with pytest.raises(UsageError, match="-1"):
        make(limit=-1)


def test_survives_a_restart(tmp_path):
    file = saved(tmp_path / "responses", [1, 2, 3], [4, 5])
    assert make(file).tokens == [1, 2, 3, SEPARATOR, 4, 5, SEPARATOR]


def test_only_the_owner_can_read_it(tmp_path):
    file = saved(tmp_path / "responses", [1, 2, 3])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_is_left_beside_it(tmp_path):
    saved(tmp_path / "responses", [1], [2], [3])
    assert [p.name for p in tmp_path.iterdir()] == ["responses"]


def test_a_smaller_bound_loads_the_newest_whole_responses(tmp_path):
    file = saved(tmp_path / "responses", [1, 2, 3], [4, 5], [6])
    assert make(file, limit=6).tokens == [4, 5, SEPARATOR, 6, SEPARATOR]


@pytest.mark.parametrize(("vocab", "identity"), [(1000, "model-b"), (999, "model-a")])
def test_ids_of_another_model_are_never_loaded_nor_overwritten(tmp_path, vocab, identity):
    file = saved(tmp_path / "responses", [1, 2, 3])
    before = file.read_bytes()
    with pytest.raises(UsageError, match="model-a"):
        make(file, vocab=vocab, identity=identity)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"dear diary", b"paceline responses 2\n", b"\x00" * 64])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"notes\.txt is not a file of responses"):
        make(file)
    assert file.read_bytes() == content


def forged(header: object, body: bytes) -> bytes:
    return b"paceline responses 1\n" + json.dumps(header).encode() + b"\n" + body


def fields(body: bytes, **changes: object) -> dict[str, object]:
    sound = {"identity": "model-a", "vocab_size": 1000, "tokens": len(body) // 4, "crc32": zlib.crc32(body)}
    return {**sound, **changes}


BODY = np.asarray([1, 2, 3, SEPARATOR], "<i4").tobytes()
OUTSIDE = np.asarray([1, 1000, SEPARATOR], "<i4").tobytes()
BELOW = np.asarray([1, -2, SEPARATOR], "<i4").tobytes()

DAMAGED = {
    "no header": b"paceline responses 1\n",
    "header not JSON": b"paceline responses 1\n{oops\n" + BODY,
    "header not an object": forged([1, 2], BODY),
    "header too long": forged(fields(BODY, identity="x" * 9000), BODY),
    "header deep": b"paceline responses 1\n" + b"[" * 4000 + b"\n",
    "field missing": forged({"identity": "model-a"}, BODY),
    "field unknown": forged(fields(BODY, more=1), BODY),
    "count negative": forged(fields(BODY, tokens=-1), BODY),
    "count huge": forged(fields(BODY, tokens=2**62), BODY),
    "count not whole": forged(fields(BODY, tokens=1.5), BODY),
    "count true": forged(fields(BODY, tokens=True), BODY),
    "cut short": forged(fields(BODY), BODY[:-2]),
    "too long": forged(fields(BODY), BODY + b"\x00\x00\x00\x00"),
    "bit flipped": forged(fields(BODY), b"\x09" + BODY[1:]),
    "id outside the vocabulary": forged(fields(OUTSIDE), OUTSIDE),
    "id below the separator": forged(fields(BELOW), BELOW),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_reported_and_replaced(tmp_path, caplog, content):
    file = tmp_path / "responses"
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "paceline"):
        store = make(file)
    assert "damaged" in caplog.text
    assert len(store) == 0
    store.add([7, 8])
    store.save()
    assert make(file).tokens == [7, 8, SEPARATOR]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200), noise=st.binary(max_size=8), at=st.integers(0, 150))
def test_no_damage_crashes_it_or_brings_in_wrong_ids(tmp_path, cut, noise, at):
    file = tmp_path / "responses"
    file.unlink(missing_ok=True)
    sound = saved(file, [1, 2, 3], [4, 5]).read_bytes()
    file.write_bytes((sound[:at] + noise + sound[at + len(noise) :])[: len(sound) - cut % len(sound)])
    try:
        tokens = make(file).tokens
    except UsageError:
        return
    assert tokens in ([], [1, 2, 3, SEPARATOR, 4, 5, SEPARATOR])


@pytest.mark.parametrize("content", [b"", forged(fields(b""), b"")])
def test_an_empty_file_and_an_empty_history_load(tmp_path, content):
    file = tmp_path / "responses"
    file.write_bytes(content)
    assert len(make(file)) == 0


def test_a_directory_in_its_place_is_an_error_with_its_name(tmp_path):
    with pytest.raises(ResourceError, match="cannot read"):
        make(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_an_error(tmp_path):
    file = saved(tmp_path / "responses", [1, 2, 3])
    file.chmod(0)
    with pytest.raises(ResourceError, match="Permission denied"):
        make(file)


def test_a_full_disk_costs_a_log_line_and_keeps_the_old_file(tmp_path, caplog, monkeypatch):
    file = saved(tmp_path / "responses", [1, 2, 3])
    before = file.read_bytes()
    store = make(file)
    real = os.fdopen

    def full(handle: int, mode: str) -> object:
        stream = real(handle, mode)

        class Full:
            def __enter__(self) -> Full:
                return self

            def __exit__(self, *_: object) -> None:
                stream.close()

            def write(self, data: bytes) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        return Full()

    monkeypatch.setattr(shared_file.os, "fdopen", full)
    with caplog.at_level(logging.WARNING, "paceline"):
        store.add([4, 5])
        store.save()
    assert "No space left on device" in caplog.text
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["responses"]
    monkeypatch.undo()
    store.save()
    assert make(file).tokens == [1, 2, 3, SEPARATOR, 4, 5, SEPARATOR]


def test_a_folder_that_does_not_exist_is_refused_and_not_made(tmp_path):
    with pytest.raises(UsageError, match="deep is not a folder"):
        make(tmp_path / "deep" / "responses")
    assert list(tmp_path.iterdir()) == []


def test_two_writers_lose_nothing_of_each_other(tmp_path):
    file = tmp_path / "responses"
    one, two = make(file), make(file)
    one.add([1, 2])
    two.add([3, 4])
    one.save()
    two.save()
    one.add([5])
    one.save()
    two.save()
    assert make(file).tokens == [1, 2, SEPARATOR, 3, 4, SEPARATOR, 5, SEPARATOR]
