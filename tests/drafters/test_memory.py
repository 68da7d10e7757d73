"""What drafters learn outlives a run, in one bounded file that nothing can make harmful."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run as command
from paceline.core import SamplingParams
from paceline.drafters import memory
from paceline.drafters.calibration import Calibration
from paceline.drafters.memory import MOST_BYTES, MOST_ENTRIES, WORTH, Learnt, Memory, Remembering, key_of
from paceline.engine import LLM
from support.block_cases import MODEL
from support.block_gguf import write_block_gguf
from support.block_heads import TinyHead
from support.gguf_writer import write_gguf
from support.tiny_pair import write_model
from support.tiny_tokenizer import metadata as tokenizer

LEARNT = Learnt([0.5, -1.25, 3.0], [4, 0, 500], 0.625, 9)
RECALLED = Learnt([0.5, -1.25, 3.0], [4, 0, WORTH], 0.625, 9)


def test_what_is_kept_is_recalled_as_a_limited_number_of_guesses(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "chances.json"
    Memory(file, "a").keep(LEARNT)
    assert Memory(file, "a").recall(3) == RECALLED
    assert Memory(file, "b").recall(3) is None
    assert Memory(file, "a").recall(4) is None, "another drafter's weights mean other things"
    assert file.stat().st_mode & 0o777 == 0o600
    Memory(file, "a").keep(RECALLED)
    assert list(json.loads(file.read_text())["entries"]) == ["a"]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "chances.json"
    for i in range(MOST_ENTRIES + 5):
        Memory(file, f"{i}").keep(LEARNT)
        if i == MOST_ENTRIES - 1:
            Memory(file, "0").keep(LEARNT)  # used again, so not the next to go
    kept = list(json.loads(file.read_text())["entries"])
    assert kept == [*map(str, range(6, MOST_ENTRIES)), "0", *map(str, range(MOST_ENTRIES, MOST_ENTRIES + 5))]
    whole = Learnt([-29.12345678901234] * 256, [2**31 - 1] * 256, 0.12345678901234567, 2**31 - 1)
    for i in range(MOST_ENTRIES):
        Memory(file, key_of(i)).keep(whole)
    assert file.stat().st_size < MOST_BYTES
    assert all(Memory(file, key_of(i)).recall(256) is not None for i in range(MOST_ENTRIES))


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "chances.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: Memory(file, f"{i}").keep(LEARNT), range(32)))
    assert sorted(map(int, json.loads(file.read_text())["entries"])) == list(range(32))
    assert [path.name for path in tmp_path.iterdir()] == ["chances.json"]


SOUND = asdict(LEARNT)
FILES: dict[str, bytes] = {
    "no JSON": b"{",
    "bytes": b"\xff\xfe\x00",
    "a list": b"[]",
    "nested": b"[" * 100_000,
    "another version": json.dumps({"format": 2, "entries": {"a": SOUND}}).encode(),
    "no version": json.dumps({"entries": {"a": SOUND}}).encode(),
    "no entries": b'{"format": 1, "entries": []}',
    "too large": b'{"format": 1, "entries": {}}'.ljust(MOST_BYTES + 1),
    "a number without end": b'{"format": 1, "entries": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_makes_no_sense_is_ignored_with_a_note(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "chances.json"
    file.write_bytes(FILES[name])
    assert Memory(file, "a").recall(3) is None
    (record,) = caplog.records
    assert f"{file} is ignored: " in record.message
    assert "learnt anew" in record.message
    Memory(file, "a").keep(LEARNT)
    assert Memory(file, "a").recall(3) == RECALLED


@pytest.mark.parametrize(
    "change",
    [
        {"weights": [0.0, float("nan"), 0.0]},
        {"weights": [0.0, float("inf"), 0.0]},
        {"weights": [0.0, 31.0, 0.0]},
        {"weights": [0.0, "1", 0.0]},
        {"weights": [0.0, True, 0.0]},
        {"weights": [0.0, 10**400, 0.0]},
        {"weights": "abc"},
        {"weights": [0.0, 0.0]},
        {"weights": []},
        {"seen": [1, 2, -1]},
        {"seen": [1, 2, 2**31]},
        {"seen": [1, 2, 1.5]},
        {"seen": None},
        {"hope": 1.5},
        {"hope": float("nan")},
        {"hope": "x"},
        {"hoped": -1},
        {"hoped": None},
        {"more": 1},
    ],
)
def test_an_entry_that_makes_no_sense_is_none(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "chances.json"
    file.write_text(json.dumps({"format": 1, "entries": {"a": SOUND | change, "b": SOUND}}))
    assert Memory(file, "a").recall(3) is None
    assert Memory(file, "b").recall(3) == RECALLED
    Memory(file, "c").keep(LEARNT)
    assert list(json.loads(file.read_text())["entries"]) == ["b", "c"]


def test_what_is_no_file_is_never_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert Memory(tmp_path / "pipe", "a").recall(3) is None
    assert Memory(tmp_path, "a").recall(3) is None
    assert caplog.text.count("no regular file") == 2


def test_where_nothing_can_be_written_drafting_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "file").write_bytes(b"")
    Memory(tmp_path / "file" / "chances.json", "a").keep(LEARNT)
    assert "could not be kept" in caplog.text
    assert Memory(tmp_path / "file" / "chances.json", "a").recall(3) is None


def test_keys_tell_apart_all_that_counts() -> None:
    assert len({key_of("a", "b"), key_of("ab"), key_of("a", "b", None), key_of("b", "a")}) == 4


class Diarist(Remembering):
    def __init__(self) -> None:
        self.calibration = Calibration([0.0, 0.0])
        self.hope = (0.5, 0)

    def _resume_hope(self, hope: float, hoped: int) -> None:
        self.hope = (hope, hoped)

    def _hope_so_far(self) -> tuple[float, int]:
        return self.hope


def test_what_was_learnt_twice_as_often_still_moves(tmp_path: Path) -> None:
    rng = random.Random(1)
    first, place = Diarist(), Memory(tmp_path / "chances.json", "a")
    first.remember(place)
    first.close()
    assert not place.file.exists(), "nothing was learnt"
    for _ in range(3000):
        first.calibration.record((0,), first.calibration.chance((0,)), rng.random() < 0.9)
    first.hope = (0.75, 40)
    first.close()
    second = Diarist()
    second.remember(place)
    assert second.calibration.weights == first.calibration.weights
    assert second.calibration.seen == [WORTH, 0]
    assert second.hope == (0.75, 40)
    assert abs(second.calibration.chance((0,)) - 0.9) < 0.05
    for _ in range(300):
        second.calibration.record((0,), second.calibration.chance((0,)), rng.random() < 0.2)
    assert abs(second.calibration.chance((0,)) - 0.2) < 0.1, "what comes now counts more"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "default_file", lambda: tmp_path / "cache" / "chances.json")
    return tmp_path / "cache" / "chances.json"


def model(path: Path, seed: int = 7) -> Path:
    tensors = MODEL.tensors() if seed == 7 else type(MODEL)(**{**_fields(MODEL), "seed": seed}).tensors()
    return write_gguf(path, MODEL.metadata() | tokenizer() | {"general.name": f"{seed}"}, tensors)


def _fields(tiny: Any) -> dict[str, Any]:
    return {name: getattr(tiny, name) for name in type(tiny).__dataclass_fields__}


ON = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def only(llm: LLM) -> Any:
    (drafter,) = llm.draft_models
    return drafter


@pytest.mark.parametrize("kind", ["dflash", "model"])
def test_a_second_run_knows_what_the_first_found_out(kind: str, place: Path, tmp_path: Path) -> None:
    target = model(tmp_path / "model.gguf")
    if kind == "dflash":
        path = write_block_gguf(tmp_path / "elsewhere.gguf", TinyHead(), first=False)
    else:
        path = write_model(tmp_path / "elsewhere.gguf", layers=1)
    spec = f"{kind}:{path},num_speculative_tokens=3"
    with LLM(target, threads=1, max_model_len=128, speculate=spec) as llm:
        fresh = list(only(llm).calibration.weights)
        texts = [llm.generate(f"abc{i}", ON).tokens for i in range(4)]
        learnt = list(only(llm).calibration.weights)
        assert learnt != fresh
    assert len(json.loads(place.read_text())["entries"]) == 1
    with LLM(target, threads=1, max_model_len=128, speculate=spec) as llm:
        assert only(llm).calibration.weights == learnt
        assert [llm.generate(f"abc{i}", ON).tokens for i in range(4)] == texts
        llm.clear()
        assert only(llm).calibration.weights == fresh, "clear forgets"
    other = model(tmp_path / "other.gguf", seed=8)
    with LLM(other, threads=1, max_model_len=128, speculate=spec) as llm:
        assert only(llm).calibration.weights == fresh, "another target"


def test_generating_keeps_it_too(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = model(tmp_path / "model.gguf")
    path = write_block_gguf(tmp_path / "elsewhere.gguf", TinyHead(), first=False)
    words = ["generate", str(target), "abc", "-n", "20", "--ignore-eos", "--threads", "1", "-q", "-c", "128"]
    assert command([*words, "--drafter", f"dflash:{path},num_speculative_tokens=3"]) == 0
    assert capsys.readouterr().out
    assert len(json.loads(place.read_text())["entries"]) == 1
