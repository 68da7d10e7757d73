"""`paceline check TARGET DRAFT` on tiny files: what it says, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import run
from support.tiny_pair import write_model
from support.vocabularies import CONTROL, byte_level


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("check") / "target.gguf", seed=1, layers=2, context=256)


def test_a_pair_is_compared_and_tried(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = byte_level(["t h", "th e", "a n", "i n", "e r"], extra={"<end>": CONTROL}, eos_token_id=261)
    draft = write_model(tmp_path / "draft.gguf", foreign, seed=3, layers=1, context=128)
    assert run(["check", str(target), str(draft), "--cases", "2", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is True
    pair = found["pair"]
    assert pair["comparison"]["mode"] == "intersection"
    assert pair["comparison"]["differing"] == [256, 257, 258, 259, 260, 261]
    assert pair["comparison"]["examples"][1] == {"token": 257, "target": "\\x98\\x80", "draft": "the"}
    assert pair["contexts"] == [256, 128]
    assert pair["obstacles"] == []
    assert pair["remedy"].startswith("Ids are translated by their bytes")
    assert set(pair["gain"]) >= {"draft_cost", "acceptance", "break_even", "forecast", "measured", "pays"}


def test_a_pair_that_cannot_work_fails_before_anything_is_loaded(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_model(tmp_path / "draft.gguf", seed=3, layers=1)
    monkeypatch.setattr("paceline.tools.pair.memory_here", lambda: 1 << 20)
    monkeypatch.setattr("paceline.models.target.NativeTarget.load", None)
    assert run(["check", str(target), str(draft)]) == 1
    out = capsys.readouterr().out
    assert "CANNOT WORK both together need" in out
    assert "The vocabularies are the same: nothing to do." in out
