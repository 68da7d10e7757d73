"""Heads change no byte: thousands of random requests, with every kind of head, against plain decoding.

Batches of requests share passes on a machine that is too small for them, some are cancelled on the way; the
heads are random, but told the truth often enough that drafts of every length are kept, cut and refused.
PACELINE_CASES=10 runs ten times as many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core import Completion, Context, Draft, Prices, SamplingParams
from paceline.drafters import registry
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from support import block_heads
from support.engines import TOKENIZER, same, submit
from support.head_targets import drafter_for, target_for
from support.planners import FixedPlanner
from support.tiny_heads import TinyHead
from support.tiny_models import TinyModel
from support.tiny_mtp import TinyMtp
from support.tiny_peagle import TinyPeagle
from support.tiny_tokenizer import VOCAB_SIZE

BATCHES = 32 * int(os.environ.get("PACELINE_CASES", "1"))
TOGETHER = 8

SIZES: dict[str, Any] = {
    "width": 32, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocab": VOCAB_SIZE,
}  # fmt: skip
MODEL = TinyModel(**SIZES, layers=4)
TAPS: dict[str, Any] = {"target_layers": 4, "taps": (1, 2, 3)}
LAST: dict[str, Any] = {"target_layers": 4, "taps": (4,)}
SPARK: dict[str, Any] = {"target_layers": 4, "taps": (0, 2), "layers": 1, "mask": 250, "confidence": True}
HEADS: dict[str, Any] = {
    "eagle": TinyHead(**SIZES, **LAST, kind="eagle", draft_vocab=0),
    "eagle3": TinyHead(**SIZES, **TAPS, draft_vocab=150, layout="vLLM"),
    "peagle": TinyPeagle(**SIZES, **TAPS, draft_vocab=0, layers=1),
    "mtp": TinyMtp(**SIZES, **LAST),
    "three MTP heads": TinyMtp(**SIZES, **LAST, layout="MiMo", heads_in_file=3),
    "dflash": block_heads.TinyHead(**SIZES, target_layers=4, layers=1, mask=250, block=9),
    "dflash with windows": block_heads.TinyHead(
        **SIZES, target_layers=4, layers=2, mask=250, layout="speculators", draft_vocab=150, sliding=(0,)
    ),
    "dspark": block_heads.TinyHead(**SIZES, **SPARK, layout="deepspec", markov="vanilla", block=16),
    "gated dspark": block_heads.TinyHead(**SIZES, **SPARK, layout="specforge", markov="gated"),
    "recurrent dspark": block_heads.TinyHead(**SIZES, **SPARK, layout="speculators", markov="rnn"),
}
CHEAP = Prices(plain=1.0, tokens=1.0, extra=[1e-6 * n for n in range(65)])
FREE = {1: 1.0, 64: 1.001}


class Grown(FixedPlanner):
    """Asks with prices at which everything pays, and so gets trees where there are any."""

    def _ask(self, drafter: Any, context: Context, budget: int) -> Draft:
        if not budget:
            return Draft.empty()
        found: Draft = drafter.propose_many([context], [budget], CHEAP)[0]
        assert len(found) <= budget
        return found


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.5, 1.0, 1.4]),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, -0.5]),
        logit_bias=rng.choice([{}, {}, {VOCAB_SIZE - 1: 3.0, 4: -2.0}]),
        min_tokens=rng.choice([0, 0, 1]),
        logprobs=rng.choice([None, None, 2]),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(40),
        max_tokens=rng.choice([1, 2, 5, 9, 20]),
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Many begin alike, so that rows of earlier texts are found again."""
    common = random.Random(rng.randrange(3))
    text = [common.randrange(VOCAB_SIZE - 2) for _ in range(rng.randint(1, 45))]
    return text + [rng.randrange(VOCAB_SIZE - 2) for _ in range(rng.randint(0, 4))]


def tell_the_truth(drafter: Any, texts: Mapping[int, Sequence[int]], rng: random.Random) -> None:
    """Let the head mostly choose what comes next in these texts, which their requests' seeds tell apart."""
    pick = type(drafter._choices).pick.__get__(drafter._choices)
    place = {token: own for own, token in enumerate(drafter._target_ids)}

    def truthful(values: Any, sampler: Any, position: int) -> tuple[int, float]:
        found: tuple[int, float] = pick(values, sampler, position)
        text = texts[sampler.params.seed]
        own = place.get(text[position]) if position < len(text) else None
        if own is None or values[own] < -1e30 or rng.random() > 0.7:
            return found
        return own, rng.choice([0.3, 0.9, 0.99])

    drafter._choices.pick = truthful


def planners(drafter: Any, rng: random.Random) -> list[Any]:
    """One for each request of a batch: all the same, or each its own."""
    length = rng.randint(1, 16)
    match rng.randrange(5):
        case 0:
            return [FixedPlanner(drafter, length)] * TOGETHER
        case 1:
            return [rng.choice([FixedPlanner, Grown])(drafter, length) for _ in range(TOGETHER)]
        case 2:
            return [Planner(PassTime(FREE), [drafter], draft_length=length)] * TOGETHER
        case 3:
            others = [registry.create(name, vocab_size=VOCAB_SIZE) for name in ("ngram", "suffix")]
            return [Planner(PassTime(FREE), [drafter, *others], max_draft=length)] * TOGETHER
    return [Planner(PassTime(FREE), [drafter], max_draft=length)] * TOGETHER


def finish(engine: Engine, requests: Sequence[Request], rng: random.Random | None = None) -> list[Completion]:
    """Step until all are over; by chance, if there is any, one is cancelled now and then."""
    while not all(request.over for request in requests):
        engine.step()
        if rng is not None and rng.random() < 0.02:
            engine.abort(rng.choice(requests))
    engine.cache.check_integrity()
    assert engine.cache.available == engine.cache.pages
    done = [request.completion for request in requests]
    for request in requests:
        if request.error is not None:
            raise request.error
    return [one for one in done if one is not None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return target_for(tmp_path_factory.mktemp("target"), MODEL, pages=40)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return target_for(tmp_path_factory.mktemp("small"), MODEL, pages=7)


@pytest.mark.parametrize("name", HEADS)
def test_random_requests_equal_plain_decoding(name: str, target: Any, small: Any, tmp_path: Path) -> None:
    rng = random.Random(name)
    drafter: Any = drafter_for(target, HEADS[name].write(tmp_path / "head"))
    drafted = accepted = 0
    for _ in range(BATCHES):
        prompts = [random_prompt(rng) for _ in range(TOGETHER)]
        params = [random_params(rng) for _ in range(TOGETHER)]
        plainly = Engine(target, TOKENIZER, context_limit=128)
        requests = [submit(plainly, prompt, its) for prompt, its in zip(prompts, params, strict=True)]
        plain = finish(plainly, requests)
        texts = {its.seed: [*p, *one.tokens] for its, p, one in zip(params, prompts, plain, strict=True)}
        tell_the_truth(drafter, texts, rng)  # type: ignore[arg-type]
        engine = Engine(rng.choice([target, small]), TOKENIZER, context_limit=128)
        each = planners(drafter, rng)
        requests = [submit(engine, *one) for one in zip(prompts, params, each, strict=True)]
        for before, done in zip(plain, finish(engine, requests, rng), strict=True):
            compare(before, done)
            drafted += done.speculation.drafted
            accepted += done.speculation.accepted
        assert drafter._seats == {}
        drafter.cache.kv.check_integrity()
        assert drafter.cache.kv.available == drafter.cache.kv.pages
    assert drafted > accepted > drafted / 10


def compare(before: Completion, done: Completion) -> None:
    if done.finish_reason == "abort":
        assert done.tokens == before.tokens[: len(done.tokens)]
    else:
        same(before, done)
