"""Speculation changes nothing that a caller sees: thousands of random cases against plain decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from paceline.core import Completion, SamplingParams
from support.engines import DRAFTERS, drafter_for, engine_for, finish, run, same, submit
from support.planners import FixedPlanner
from support.stub_target import RandomRule, RepetitiveRule, Rule
from support.tiny_tokenizer import EOS, VOCAB_SIZE

LENGTHS = (1, 2, 4, 8, 16)
RULES: list[Rule] = [
    RepetitiveRule(VOCAB_SIZE, seed=1, peak=6.0),
    RepetitiveRule(VOCAB_SIZE, seed=2, peak=5.0, cycle=3),
    RandomRule(VOCAB_SIZE, seed=3),
]


@dataclass
class Case:
    prompt: list[int]
    params: SamplingParams
    prediction: list[int]
    plain: Completion


def random_params(rng: random.Random) -> SamplingParams:
    def often(value: float, default: float, chance: float = 0.25) -> float:
        return value if rng.random() < chance else default

    max_tokens = rng.choice([1, 2, 3, 5, 12, 24, 24, 24])
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 0.8, 1.5]),
        top_k=int(often(rng.randint(1, 40), 0)),
        top_p=often(rng.uniform(0.2, 0.99), 1.0),
        min_p=often(rng.uniform(0.0, 0.3), 0.0),
        seed=rng.getrandbits(40),
        max_tokens=max_tokens,
        min_tokens=int(often(rng.randint(0, max_tokens), 0)),
        stop=[chr(rng.randint(97, 122)) for _ in range(int(often(4, 0)))],
        stop_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(int(often(8, 0)))],
        ignore_eos=rng.random() < 0.2,
        presence_penalty=often(rng.uniform(-2, 2), 0.0),
        frequency_penalty=often(rng.uniform(-2, 2), 0.0),
        repetition_penalty=often(rng.uniform(0.5, 2), 1.0),
        logit_bias={rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9) for _ in range(int(often(5, 0)))}
        | ({EOS: 4.0} if rng.random() < 0.3 else {}),
        logprobs=rng.choice([None, None, 0, 3]),
    )


def random_case(rng: random.Random, rule: Rule) -> Case:
    phrase = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
    prompt = (phrase * 4)[: rng.randint(1, 40)]
    params = random_params(rng)
    plain = run(engine_for(rule), prompt, params)
    prediction = list(plain.tokens)
    if prediction and rng.random() < 0.5:
        prediction[rng.randrange(len(prediction))] = rng.randrange(VOCAB_SIZE)
    return Case(prompt, params, prediction, plain)


def random_planner(rng: random.Random, case: Case) -> FixedPlanner:
    truth = case.prompt + case.plain.tokens
    drafter = drafter_for(rng.choice(DRAFTERS), truth, seed=rng.getrandbits(30))
    return FixedPlanner(drafter, rng.choice(LENGTHS))


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_equal_plain_decoding(seed: int) -> None:
    """Batches of requests on a machine that is too small for them, first cold, then warm."""
    rng = random.Random(seed)
    for _ in range(20):
        rule = rng.choice(RULES)
        cases = [random_case(rng, rule) for _ in range(4)]
        engine = engine_for(
            rule,
            page_size=rng.choice([2, 4, 8]),
            pages=rng.choice([40, 60, 128]),
            max_rows=rng.choice([4, 7, 24, 64]),
            context_limit=80,
        )
        for _ in range(2):
            requests = [
                submit(engine, case.prompt, case.params, random_planner(rng, case), case.prediction)
                for case in cases
            ]
            for case, completion in zip(cases, finish(engine, *requests), strict=True):
                same(case.plain, completion)
            assert engine.cache.available == engine.cache.pages


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_at_every_length(name: str, length: int) -> None:
    rng = random.Random(length)
    for rule in RULES:
        engine = engine_for(rule)
        for _ in range(5):
            case = random_case(rng, rule)
            planner = FixedPlanner(drafter_for(name, case.prompt + case.plain.tokens), length)
            same(case.plain, run(engine, case.prompt, case.params, planner, case.prediction))


def test_rejection_without_drafts_is_plain_decoding() -> None:
    rule = RULES[2]
    for seed in range(20):
        coupled = SamplingParams(seed=seed, max_tokens=20)
        rejection = SamplingParams(seed=seed, max_tokens=20, verification="rejection")
        same(run(engine_for(rule), [1, 2, 3], coupled), run(engine_for(rule), [1, 2, 3], rejection))


def test_rejection_serves_trees_and_chains() -> None:
    rule = RULES[0]
    truth = [1, 2, 3, *run(engine_for(rule), [1, 2, 3], SamplingParams(seed=1, max_tokens=40)).tokens]
    engine = engine_for(rule)
    for name in DRAFTERS:
        params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, verification="rejection")
        completion = run(engine, [1, 2, 3], params, FixedPlanner(drafter_for(name, truth), 8), truth[3:])
        assert len(completion.tokens) == 40
