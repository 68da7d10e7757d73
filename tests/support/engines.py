"""Short ways to run requests on a stub target, and every drafter that can be pointed at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core import Completion, Drafter, SamplingParams
from paceline.drafters import registry
from paceline.engine.engine import Engine
from paceline.engine.request import Planner, Request
from support.drafters import Adversary, NextToken, Oracle, RandomChain, RandomTree, following
from support.planners import FixedPlanner
from support.stub_target import RepetitiveRule, Rule, StubTarget
from support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
RULE = RepetitiveRule(VOCAB_SIZE, peak=6.0)

DRAFTERS = ("none", "oracle", "adversary", "random", "tree", "ngram", "suffix", "prediction")


def engine_for(rule: Rule = RULE, **target: Any) -> Engine:
    return Engine(StubTarget(rule, **target), TOKENIZER)


def drafter_for(name: str, truth: Sequence[int], seed: int = 0) -> Drafter | None:
    """A drafter by name; `truth` is prompt and output of the plain run."""
    next_token: NextToken = following(truth)
    match name:
        case "none":
            return None
        case "oracle":
            return Oracle(next_token)
        case "adversary":
            return Adversary(next_token, VOCAB_SIZE)
        case "random":
            return RandomChain(VOCAB_SIZE, seed)
        case "tree":
            return RandomTree(VOCAB_SIZE, seed, next_token=next_token, truth=0.7)
        case _:
            return registry.create(name, vocab_size=VOCAB_SIZE)


def submit(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    planner: Planner | None = None,
    prediction: Sequence[int] = (),
) -> Request:
    assert params.seed is not None or params.greedy
    return engine.add(prompt, params, planner or FixedPlanner(), seed=params.seed or 0, prediction=prediction)


def finish(engine: Engine, *requests: Request) -> list[Completion]:
    """Step until all of these are over; every page must then be accounted for."""
    while not all(request.over for request in requests):
        engine.step()
    engine.cache.check_integrity()
    done = []
    for request in requests:
        if request.error is not None:
            raise request.error
        assert request.completion is not None
        done.append(request.completion)
    return done


def run(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    planner: Planner | None = None,
    prediction: Sequence[int] = (),
) -> Completion:
    return finish(engine, submit(engine, prompt, params, planner, prediction))[0]


def same(one: Completion, other: Completion) -> None:
    """What a caller asked for is equal; only how fast it came may differ."""
    assert one.tokens == other.tokens
    assert one.text == other.text
    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    assert one.logprobs == other.logprobs
    assert one.prompt_tokens == other.prompt_tokens
    assert len(other.token_sources) == len(other.tokens)
