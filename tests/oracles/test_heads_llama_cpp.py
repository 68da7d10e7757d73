"""Heads and block drafters in GGUF files against llama.cpp, which drafts with the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oracles.llama_heads import CASES, played
from oracles.record_llama_heads import RECORDED

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", CASES)
def test_recorded_values_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    record = json.loads(RECORDED.read_text())[name]
    text, told = played(CASES[name], tmp_path, record["seed"])
    assert text == record["text"]
    for its, other in zip(told, record["rounds"], strict=True):
        assert its.length == other["length"]
        for place, likeliest in zip(its.places, other["places"], strict=True):
            assert [token for token, _ in place] == [token for token, _ in likeliest]
            assert [share for _, share in place] == pytest.approx([share for _, share in likeliest], abs=2e-3)
