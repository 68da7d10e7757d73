"""Learned drafters against public code that runs the same checkpoints; see head_cases for whose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="oracles have an environment of their own")

from oracles.head_cases import CASES, SOURCES, TARGET
from oracles.public_code import SOURCES as CLONES
from oracles.public_code import PublicTarget
from oracles.record_heads import EVERY, RECORDED, opened, texts
from paceline.models.target import NativeTarget
from paceline.weights.source import open_model
from support.head_targets import drafter_for
from support.public_rounds import Round, answers

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
]  # of what public code does not know yet

RECORDS = json.loads(RECORDED.read_text())
HERE = [name for name in CASES if CASES[name].by not in SOURCES or CLONES.is_dir()]
names = pytest.mark.parametrize("name", HERE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TARGET.write(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def public(folder: Path) -> PublicTarget:
    return PublicTarget(folder)


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[NativeTarget]:
    with open_model(folder) as file:
        yield NativeTarget.load(file, threads=1, max_model_len=256)


def written(name: str, folder: Path) -> Path:
    return replace(CASES[name].head, seed=RECORDS[name]["seed"]).write(folder / "head")


def ours(path: Path, target: NativeTarget, asked: list[Round], **options: Any) -> list[Round]:
    drafter = drafter_for(target, path, **options)
    return answers(drafter, target, [(its.text, len(its.drafts)) for its in asked])


def distance(one: Round, other: Round) -> float:
    """Largest difference of logits that were computed behind the same drafts, relative to the largest."""
    count = one.common(other)
    return float(np.abs(one.logits[:count] - other.logits[:count]).max() / one.largest)


@names
def test_recorded_values_are_those_of_public_code(name: str, public: PublicTarget, tmp_path: Path) -> None:
    case, record = CASES[name], RECORDS[name]
    rounds = opened(case, written(name, tmp_path), public).play(texts(), case.count)
    for its, told in zip(rounds, record["rounds"], strict=True):
        assert its.text == record["text"][: told["length"]]
        assert its.drafts == told["drafts"]
        assert np.abs(its.logits[:, ::EVERY] - np.array(told["logits"])).max() < 1e-4 * told["largest"]
        assert its.sure == pytest.approx(told["sure"], abs=1e-4)


@names
def test_checkpoints_that_public_code_wrote(
    name: str, public: PublicTarget, target: NativeTarget, tmp_path: Path
) -> None:
    """Its own names and its own spelling of the configuration, in bfloat16 as published."""
    case = CASES[name]
    drafter: Any = opened(case, written(name, tmp_path), public)
    if not hasattr(drafter, "save"):
        pytest.skip("it has no way to write one")
    import torch

    drafter.model.to(torch.bfloat16)
    drafter.save(tmp_path / "saved")
    rounds = opened(case, tmp_path / "saved", public).play(texts(), case.count)
    for theirs, its in zip(rounds, ours(tmp_path / "saved", target, rounds), strict=True):
        assert distance(theirs, its) <= 2e-3
        assert its.drafts == theirs.drafts or tied(theirs)


def tied(its: Round) -> bool:
    """Whether half precision in our cache may decide: these checkpoints were not chosen without near ties."""
    best = np.sort(its.logits, axis=1)[:, -2:]
    return bool((best[:, 1] - best[:, 0]).min() < 2e-3 * its.largest)


@names
def test_in_bfloat16_it_is_no_farther_from_float32_than_public_code_is(
    name: str, folder: Path, public: PublicTarget, target: NativeTarget, tmp_path: Path
) -> None:
    import torch

    case = CASES[name]
    if case.by in ("ZLab", "TransformersMtp"):
        pytest.skip("it takes the target's dtype, which would be rounded too")
    path = written(name, tmp_path)
    exact = opened(case, path, public).play(texts(), case.count)
    rounded = opened(case, path, PublicTarget(folder, torch.bfloat16)).play(texts(), case.count)
    mine = ours(path, target, exact, dtype="bf16")
    assert noise(exact, mine) <= noise(exact, rounded)


def noise(exact: list[Round], others: list[Round]) -> float:
    """Root of the mean square of all differences, relative to the largest logits."""
    parts = [
        (one.logits[: one.common(other)] - other.logits[: one.common(other)]).reshape(-1) / one.largest
        for one, other in zip(exact, others, strict=True)
    ]
    return float(np.sqrt(np.mean(np.concatenate(parts) ** 2)))
