"""Layers with a sliding window: the same text as with everything kept, from pages for hardly more than it.

The stub target reads its second store only where a row sees it, and what is given back is soon written over.
So a page that went too early, or a rejected row that stayed, changes the text.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from paceline.core import Completion, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from support.drafters import RandomTree, SyntheticAcceptance, following
from support.engines import DRAFTERS, RULE, TOKENIZER, drafter_for, engine_for, finish, run, same, submit
from support.planners import FixedPlanner
from support.stub_target import RandomRule, RepetitiveRule, Rule, StubTarget, greedy
from support.tiny_tokenizer import VOCAB_SIZE

PAGE = 8
PROMPT = list(b"the cat sat on the mat and the cat")
KINDS: dict[str, dict[str, Any]] = {"windowed": {"everywhere": True}, "alternating": {}}
SIGHTS = [1, 2, PAGE - 1, PAGE, PAGE + 1, 16, 21]
kinds = pytest.mark.parametrize("kind", KINDS)


def target_of(engine: Engine) -> StubTarget:
    assert isinstance(engine.target, StubTarget)
    return engine.target


def most_pages(sight: int, rows: int) -> int:
    """Pages that rows behind each other and what the first of them sees can lie in."""
    return (sight - 1 + rows - 2) // PAGE + 2


def watched(engine: Engine, request: Request, draft: int) -> Completion:
    """Run one request; between passes it holds what its next row sees, and a pass adds just its own rows."""
    sight, longest = target_of(engine).sight, 0
    while not request.over:
        longest = max(longest, request.pending + draft)
        engine.step()
        if request.sequence is not None:
            assert request.sequence._near is not None
            assert sum(request.sequence._near.held) <= most_pages(sight, 1)
    done = finish(engine, request)[0]
    assert len(target_of(engine).touched) <= most_pages(sight, longest)
    return done


@kinds
@pytest.mark.parametrize("batch", range(4))
def test_x23_before_at_and_after_the_wrap(kind: str, batch: int) -> None:
    stub = {"sight": 16, **KINDS[kind]}
    rule = RandomRule(VOCAB_SIZE, seed=batch)
    for seed in range(125 * batch, 125 * (batch + 1)):
        prompt = [(7 * seed + i * i) % VOCAB_SIZE for i in range(10)]
        params = SamplingParams(temperature=seed % 2, seed=seed, max_tokens=40, ignore_eos=True)
        plain = run(engine_for(rule, **stub), prompt, params)
        drafter = SyntheticAcceptance(following([*prompt, *plain.tokens]), [0.7] * 4, VOCAB_SIZE, seed)
        engine = engine_for(rule, **stub)
        same(plain, watched(engine, submit(engine, prompt, params, FixedPlanner(drafter, 4)), 4))
        if params.greedy:
            assert plain.tokens == greedy(rule, prompt, 40, **stub)


@kinds
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_at_every_window(kind: str, sight: int, name: str) -> None:
    """Drafts of 16 tokens are longer than most of these windows."""
    stub = {"sight": sight, **KINDS[kind]}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = greedy(RULE, PROMPT, 60, **stub)
    for length in (1, 5, 16):
        engine = engine_for(RULE, **stub)
        planner = FixedPlanner(drafter_for(name, [*PROMPT, *expected]), length)
        request = submit(engine, PROMPT, params, planner, expected)
        assert watched(engine, request, length).tokens == expected


@kinds
@pytest.mark.parametrize("sight", [1, PAGE, 16])
def test_a_text_of_many_windows_takes_the_pages_of_one(kind: str, sight: int) -> None:
    stub = {"sight": sight, "context_limit": 512, "max_rows": 32, **KINDS[kind]}
    engine = engine_for(RULE, **stub)
    params = SamplingParams(temperature=0, max_tokens=460, ignore_eos=True)
    expected = greedy(RULE, PROMPT, 460, sight=sight, **KINDS[kind])
    tree = RandomTree(VOCAB_SIZE, next_token=following([*PROMPT, *expected]), truth=0.7)
    assert watched(engine, submit(engine, PROMPT, params, FixedPlanner(tree, 12)), 12).tokens == expected


class Batch:
    """Four requests with prompts that begin alike, and what each writes alone."""

    def __init__(self, rng: random.Random, rule: Rule, stub: dict[str, Any]) -> None:
        start = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 30))]
        self.rng = rng
        self.asked: list[tuple[list[int], SamplingParams]] = []
        for _ in range(4):
            prompt = [*start, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8)))]
            warm, seed, length = rng.choice([0.0, 1.0]), rng.getrandbits(30), rng.randint(1, 40)
            self.asked.append((prompt, SamplingParams(temperature=warm, seed=seed, max_tokens=length)))
        self.plain = [run(engine_for(rule, **stub), *one) for one in self.asked]

    def check(self, engine: Engine) -> None:
        requests = []
        for (prompt, params), alone in zip(self.asked, self.plain, strict=True):
            truth, seed = [*prompt, *alone.tokens], self.rng.getrandbits(30)
            planner = FixedPlanner(
                drafter_for(self.rng.choice(DRAFTERS), truth, seed), self.rng.choice([1, 4, 16])
            )
            requests.append(submit(engine, prompt, params, planner, alone.tokens))
        for one, other in zip(self.plain, finish(engine, *requests), strict=True):
            same(one, other)
        assert engine.cache.used == 0.0


@kinds
@pytest.mark.parametrize("seed", range(10))
def test_random_batches_on_few_pages(kind: str, seed: int) -> None:
    """Texts that share, give way and come back, on hardly more window pages than one of them needs."""
    rng = random.Random(f"{kind} {seed}")
    rules: list[Rule] = [RepetitiveRule(VOCAB_SIZE, seed=1, peak=6.0), RandomRule(VOCAB_SIZE, seed=3)]
    for _ in range(12):
        rule, page = rng.choice(rules), rng.choice([2, 4, 8])
        sight = rng.choice([1, 3, page, 9, 16, 30])
        stub = {"sight": sight, "page_size": page, "context_limit": 80, **KINDS[kind]}
        batch = Batch(rng, rule, stub)
        least = -(-sight // page) + 3
        engine = engine_for(
            rule,
            **stub,
            pages=rng.choice([40, 60]),
            max_rows=rng.choice([4, 7, 24]),
            window_pages=rng.randint(least, 2 * least + 8),
        )
        batch.check(engine)
        batch.check(engine)


@kinds
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(("prompt_length", "expected"), [(120, 8), (126, 2), (127, 1)])
def test_x5_context_limit(kind: str, name: str, prompt_length: int, expected: int) -> None:
    stub = {"sight": 16, "context_limit": 128, "pages": 16, **KINDS[kind]}
    prompt = (PROMPT * 4)[:prompt_length]
    params = SamplingParams(temperature=0, max_tokens=64)
    plain = run(engine_for(RULE, **stub), prompt, params)
    assert (len(plain.tokens), plain.finish_reason) == (expected, "length")
    planner = FixedPlanner(drafter_for(name, [*prompt, *plain.tokens]), 5)
    same(plain, run(engine_for(RULE, **stub), prompt, params, planner, plain.tokens))


@kinds
def test_a_prompt_waits_no_longer_than_its_window_needs(kind: str) -> None:
    """A long prompt beside a running text asks for the pages of its window, not of its length."""
    stub = {
        "sight": 16,
        "context_limit": 400,
        "pages": 120,
        "window_pages": 16,
        "max_rows": 24,
        **KINDS[kind],
    }
    engine = engine_for(RULE, **stub)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    long = (PROMPT * 8)[:250]
    first, second = submit(engine, PROMPT, params), submit(engine, long, params)
    while not first.generated:
        engine.step()
    assert engine.running == 2
    texts = [done.tokens for done in finish(engine, first, second)]
    assert texts == [greedy(RULE, prompt, 30, sight=16, **KINDS[kind]) for prompt in (PROMPT, long)]
    assert engine.counters.preemptions == 0


@kinds
@pytest.mark.parametrize("longest", [20, 200])
def test_completions_of_one_prompt_share_it(kind: str, longest: int) -> None:
    """Also when the first has long left the prompt behind before the others come to run."""
    stub = {"sight": 16, "context_limit": 400, **KINDS[kind]}
    engine = Engine(StubTarget(RULE, **stub), TOKENIZER, max_num_seqs=1 if longest > 20 else 3)
    params = SamplingParams(temperature=1, seed=5, max_tokens=longest, ignore_eos=True)
    leader = engine.add(PROMPT, params, FixedPlanner(), seed=5)
    others = [engine.add(PROMPT, params, FixedPlanner(), seed=5 + i, leader=leader, index=i) for i in (1, 2)]
    for i, done in enumerate(finish(engine, leader, *others)):
        alone = run(engine_for(RULE, **stub), PROMPT, replace(params, seed=5 + i))
        assert done.tokens == alone.tokens
