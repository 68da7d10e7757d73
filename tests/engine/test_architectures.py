"""Every architecture under the engine: with drafts the same bytes as without, whatever windows give back.

The truth comes from passes over one text alone whose pages are all kept, without any engine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core import Completion, SamplingParams
from paceline.engine.engine import Engine
from paceline.models.target import NativeTarget
from paceline.weights.gguf import GGUFFile
from support.drafters import RandomTree, SyntheticAcceptance, following
from support.engines import TOKENIZER, finish, run, same, submit
from support.passes import greedy
from support.planners import FixedPlanner
from support.reference_decoder import ReferenceDecoder
from support.tiny_tokenizer import VOCAB_SIZE
from support.zoo import ZOO

CONTEXT = 256
WINDOW = "attention.sliding_window"
WINDOWED = [name for name, model in ZOO.items() if WINDOW in model.scaling]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("zoo")

    @cache
    def written(name: str, window: int) -> Path:
        model = replace(ZOO[name], vocab=VOCAB_SIZE)
        if WINDOW in model.scaling:
            model = replace(model, scaling={**model.scaling, WINDOW: window})
        return model.write(folder / f"{name.replace(' ', '-').replace(',', '')}-{window}.gguf")

    def load(name: str, window: int = 20) -> NativeTarget:
        file = GGUFFile.open(written(name, window))
        return NativeTarget.load(file, threads=2, max_model_len=CONTEXT, pages=24)

    load.written = written  # type: ignore[attr-defined]
    return load


def engine_of(target: NativeTarget, **options: Any) -> Engine:
    return Engine(target, TOKENIZER, **options)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("window", [1, 31, 32, 33, 50])
def test_texts_of_several_windows(load: Any, name: str, window: int) -> None:
    """Prompt, wrap and what follows, from pages for one window; drafts are longer than the shortest."""
    prompt = [(7 * i * i + window) % VOCAB_SIZE for i in range(40)]
    expected = greedy(load(name, window), prompt, 200)
    target = load(name, window)
    engine = engine_of(target)
    tree = RandomTree(VOCAB_SIZE, next_token=following([*prompt, *expected]), truth=0.7)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    request = submit(engine, prompt, params, FixedPlanner(tree, 12))
    while not request.over:
        engine.step()
        if request.sequence is not None:
            assert request.sequence._near is not None
            assert sum(request.sequence._near.held) <= (window - 2) // 32 + 2
    assert finish(engine, request)[0].tokens == expected
    assert request.stats.accepted > 50
    text = [*prompt, *expected]
    reference = ReferenceDecoder(load.written(name, window), as_kernels=True)
    logits = reference.logits(text, longest=CONTEXT)[len(prompt) - 1 : -1]
    chosen = logits[np.arange(len(expected)), expected]
    assert (chosen >= logits.max(axis=1) - 1e-3 * logits.std()).all()


def random_case(rng: random.Random, start: list[int]) -> tuple[list[int], SamplingParams]:
    prompt = [*start, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.8, 1.5]),
        top_k=rng.choice([0, 0, 20]),
        seed=rng.getrandbits(30),
        max_tokens=rng.randint(1, 30),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        ignore_eos=rng.random() < 0.5,
    )
    return prompt, params


def planner(rng: random.Random, prompt: list[int], plain: Completion) -> FixedPlanner:
    truth, seed = following([*prompt, *plain.tokens]), rng.getrandbits(30)
    if rng.random() < 0.5:
        return FixedPlanner(SyntheticAcceptance(truth, [0.7] * 8, VOCAB_SIZE, seed), rng.choice([2, 8]))
    return FixedPlanner(RandomTree(VOCAB_SIZE, seed, next_token=truth, truth=0.7), rng.choice([4, 12]))


@pytest.mark.parametrize("name", ZOO)
def test_random_cases_of_every_architecture(load: Any, name: str) -> None:
    """Four at a time, with prompts that begin alike, on pages for hardly more than two of them."""
    rng = random.Random(name)
    plain, engine = engine_of(load(name)), engine_of(load(name), max_num_batched_tokens=40)
    for _ in range(16):
        start = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 60))]
        cases = [random_case(rng, start) for _ in range(4)]
        alone = [run(plain, prompt, params) for prompt, params in cases]
        requests = [
            submit(engine, prompt, params, planner(rng, prompt, one))
            for (prompt, params), one in zip(cases, alone, strict=True)
        ]
        for one, other in zip(alone, finish(engine, *requests), strict=True):
            same(one, other)
        assert engine.cache.used == 0.0
