"""Drafters say what public code says, as oracles.record_heads and its like recorded it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracles.head_cases import CASES as TORCH_CASES
from oracles.head_cases import TARGET
from oracles.llama_heads import CASES as LLAMA_CASES
from oracles.llama_heads import SHARED, target_at
from oracles.vllm_cases import CASES as VLLM_CASES
from paceline.models.target import NativeTarget
from paceline.weights.gguf import GGUFFile
from paceline.weights.source import open_model
from support.head_targets import drafter_for
from support.public_rounds import answers

RECORDED = Path(__file__).parent / "recorded"
RECORDS = json.loads((RECORDED / "public_heads.json").read_text())
RECORDS |= json.loads((RECORDED / "vllm_heads.json").read_text())
LLAMA_RECORDS = json.loads((RECORDED / "llama_heads.json").read_text())
CASES = {**TORCH_CASES, **VLLM_CASES}
EVERY = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeTarget]:
    with open_model(TARGET.write(tmp_path_factory.mktemp("target"))) as file:
        yield NativeTarget.load(file, threads=1, max_model_len=256)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_drafts_are_those_of_public_code(name: str, target: NativeTarget, tmp_path: Path) -> None:
    """End to end: states of our target, our drafter's cache over a text that grows."""
    record = RECORDS[name]
    drafter = drafter_for(target, replace(CASES[name].head, seed=record["seed"]).write(tmp_path / "head"))
    wanted = record["rounds"]
    asked = [(record["text"][: its["length"]], len(its["drafts"])) for its in wanted]
    for theirs, ours in zip(wanted, answers(drafter, target, asked), strict=True):
        assert ours.drafts == theirs["drafts"]
        far = np.abs(ours.logits[:, ::EVERY] - np.array(theirs["logits"])).max()
        assert far <= 2e-3 * theirs["largest"]
        assert ours.sure == pytest.approx(theirs["sure"], abs=2e-3)


@pytest.mark.parametrize("name", LLAMA_CASES)
def test_drafts_and_chances_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """llama.cpp tells three digits of the shares of the likeliest ten."""
    record = LLAMA_RECORDS[name]
    with GGUFFile.open(target_at(tmp_path / "target.gguf")) as file:
        target = NativeTarget.load(file, threads=1, max_model_len=256)
        drafter = drafter_for(target, LLAMA_CASES[name].write(tmp_path / "head.gguf", record["seed"]))
        asked = [(record["text"][: its["length"]], len(its["places"])) for its in record["rounds"]]
        for its, ours in zip(record["rounds"], answers(drafter, target, asked), strict=True):
            assert ours.drafts == [place[0][0] for place in its["places"]]
            for row, place in zip(ours.logits, its["places"], strict=True):
                best = np.sort(row)[::-1][:SHARED]
                shares = np.exp(best - best[0]) / np.exp(best - best[0]).sum()
                assert shares[: len(place)] == pytest.approx([share for _, share in place], abs=2e-3)


def test_every_layout_has_a_record() -> None:
    assert list(RECORDS) == list(CASES)
    assert list(LLAMA_RECORDS) == list(LLAMA_CASES)
