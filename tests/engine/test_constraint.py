"""Constrained text through the whole engine: valid, and the same with speculation as without."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from paceline.core import Completion, Constraint, Drafter, SamplingParams
from paceline.drafters import registry
from paceline.engine import LLM
from paceline.engine.engine import Engine
from paceline.errors import RequestError
from paceline.planning.pass_time import PassTime
from paceline.text.grammar import compile_constraint
from paceline.text.tool_calls import ToolCallParser, force_calls
from support.drafters import Adversary, Oracle, RandomChain, RandomTree, following
from support.engines import finish, same
from support.grammars import Listed, RandomSchema, json_tokenizer
from support.planners import FixedPlanner
from support.stub_target import RandomRule, StubTarget

TOKENIZER = json_tokenizer()
SIZE = TOKENIZER.vocab_size
PROMPT = TOKENIZER.encode("Write JSON: ", add_special=False)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
DRAFTERS = ("grammar", "oracle", "adversary", "random", "tree", "suffix", "ngram")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=1.3, top_p=0.7, top_k=20, min_p=0.01),
    "adjusted": SamplingParams(temperature=0.8, repetition_penalty=1.2, logit_bias={65: 3.0}, min_tokens=5),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
}


def drafter_for(name: str, truth: list[int]) -> Drafter:
    next_token = following(truth)
    match name:
        case "oracle":
            return Oracle(next_token)
        case "adversary":
            return Adversary(next_token, SIZE)
        case "random":
            return RandomChain(SIZE, 1)
        case "tree":
            return RandomTree(SIZE, 2, next_token=next_token, truth=0.7)
        case _:
            return registry.create(name, vocab_size=SIZE)


def run(
    constraint: Constraint,
    params: SamplingParams,
    drafter: Drafter | None = None,
    *,
    rule_seed: int = 0,
    length: int = 6,
    **target: Any,
) -> Completion:
    engine = Engine(StubTarget(RandomRule(SIZE, rule_seed), **target), TOKENIZER)
    params = replace(params, max_tokens=params.max_tokens or 200)
    planner = FixedPlanner(drafter, length)
    return finish(engine, engine.add(PROMPT, params, planner, seed=3, constraint=constraint.fresh()))[0]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_tokens_with_any_drafter(name: str, sampling: str) -> None:
    constraint, params = compile_constraint("json_schema", PERSON, TOKENIZER), SAMPLINGS[sampling]
    plain = run(constraint, params)
    for length in (1, 6):
        drafted = run(constraint, params, drafter_for(name, PROMPT + plain.tokens), length=length)
        same(plain, drafted)
    if plain.finish_reason == "stop":
        jsonschema.validate(json.loads(plain.text), PERSON)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block", range(4))
def test_random_schemas_write_valid_and_equal_text(block: int, temperature: float) -> None:
    for seed in range(block * 10, block * 10 + 10):
        schema = RandomSchema(seed).schema
        constraint = compile_constraint("json_schema", schema, TOKENIZER)
        params = SamplingParams(temperature=temperature)
        plain = run(constraint, params, rule_seed=seed)
        truth = PROMPT + plain.tokens
        for name in ("grammar", "tree", "adversary"):
            same(plain, run(constraint, params, drafter_for(name, truth), rule_seed=seed))
        if plain.finish_reason == "stop":
            jsonschema.validate(json.loads(plain.text), schema, jsonschema.Draft202012Validator)
        else:
            assert len(plain.tokens) == 200


def test_rejection_sampling_writes_what_the_constraint_allows() -> None:
    constraint = compile_constraint("json_schema", PERSON, TOKENIZER)
    params = SamplingParams(temperature=1.0, verification="rejection")
    for seed in range(10):
        drafter = RandomTree(SIZE, seed, next_token=following(PROMPT), truth=0.0)
        done = run(constraint, params, drafter, rule_seed=seed)
        if done.finish_reason == "stop":
            jsonschema.validate(json.loads(done.text), PERSON)


def test_forced_tokens_cost_no_pass_of_their_own() -> None:
    constraint = compile_constraint("choice", ["the only answer there is, 12 times true"], TOKENIZER)
    plain = run(constraint, SAMPLINGS["plain"])
    drafted = run(constraint, SAMPLINGS["plain"], registry.create("grammar", vocab_size=SIZE), length=60)
    same(plain, drafted)
    assert drafted.text == "the only answer there is, 12 times true"
    assert drafted.token_sources == [""] + ["grammar"] * (len(drafted.tokens) - 1)
    assert drafted.speculation.acceptance_rate == 1.0
    assert (plain.speculation.passes, drafted.speculation.passes) == (len(plain.tokens) - 1, 1)


def test_a_capped_text_ends_as_what_it_is() -> None:
    constraint = compile_constraint("json_schema", PERSON, TOKENIZER)
    done = run(constraint, SamplingParams(temperature=0.0, max_tokens=4))
    assert (done.finish_reason, len(done.tokens)) == ("length", 4)
    assert done.text == '{"name": '


def test_a_stop_string_ends_a_constrained_text_too() -> None:
    constraint = compile_constraint("choice", ["one two three"], TOKENIZER)
    for name in ("grammar", "oracle"):
        done = run(constraint, SamplingParams(temperature=0.0, stop=["two"]), drafter_for(name, []))
        assert (done.text, done.finish_reason, done.stop_reason) == ("one ", "stop", "two")


def test_requests_that_are_sent_back_go_on_where_they_were() -> None:
    """Too few pages for all: the youngest are recomputed, their constraints with them."""
    engine = Engine(StubTarget(RandomRule(SIZE), pages=10), TOKENIZER, context_limit=79)
    schemas = [RandomSchema(seed).schema for seed in (0, 3, 5)] + [PERSON] * 3
    constraints = [compile_constraint("json_schema", schema, TOKENIZER) for schema in schemas]
    params = SamplingParams(temperature=1.0, max_tokens=60)
    requests = [
        engine.add(
            PROMPT,
            params,
            FixedPlanner(registry.create("grammar", vocab_size=SIZE)),
            seed=3,
            constraint=c.fresh(),
        )
        for c in constraints
    ]
    together = finish(engine, *requests)
    for constraint, done in zip(constraints, together, strict=True):
        alone = run(constraint, params)
        assert done.tokens == alone.tokens


def test_an_interrupted_step_leaves_no_trace_in_the_constraint() -> None:
    constraint = compile_constraint("json_schema", PERSON, TOKENIZER)
    plain = run(constraint, SAMPLINGS["plain"])
    target = StubTarget(RandomRule(SIZE))
    engine = Engine(target, TOKENIZER)
    drafter = drafter_for("tree", PROMPT + plain.tokens)
    params = replace(SAMPLINGS["plain"], max_tokens=200)
    request = engine.add(PROMPT, params, FixedPlanner(drafter), seed=3, constraint=constraint.fresh())
    for step in range(400):
        if request.over:
            break
        if step % 3 == 2:
            target.fail = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        else:
            engine.step()
    assert request.completion is not None
    assert request.completion.tokens == plain.tokens


def test_a_constraint_that_cannot_go_on_ends_its_own_request_alone() -> None:
    engine = Engine(StubTarget(RandomRule(SIZE)), TOKENIZER)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    broken = engine.add(PROMPT, params, FixedPlanner(), seed=0, constraint=Listed([[5], [6], []], SIZE))
    sound = engine.add(PROMPT, params, FixedPlanner(), seed=0)
    while not (broken.over and sound.over):
        engine.step()
    assert isinstance(broken.error, RequestError)
    assert "allows 0 of" in broken.error.message
    assert sound.completion is not None
    assert len(sound.completion.tokens) == 12


def llm() -> LLM:
    target = StubTarget(RandomRule(SIZE))
    return LLM.from_target(target, TOKENIZER, pass_time=PassTime({1: 1e-3, 64: 1.2e-3}))


def test_llm_takes_a_constraint_and_auto_drafts_what_it_forces() -> None:
    constraint = compile_constraint("json_schema", PERSON, TOKENIZER)
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=200)
    with llm() as model:
        off = model.generate(PROMPT, params, speculate="off", constraint=constraint)
        on = model.generate(PROMPT, params, speculate="auto", constraint=constraint)
    assert [done.tokens for done in on] == [done.tokens for done in off]
    assert len({tuple(done.tokens) for done in on}) == 3
    for done in on:
        jsonschema.validate(json.loads(done.text), PERSON)
        assert "grammar" in done.token_sources
        assert (
            done.speculation.by_drafter["grammar"].accepted == done.speculation.by_drafter["grammar"].drafted
        )


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_a_forced_call_is_parsed_as_it_streams(form: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": "look_up", "parameters": PERSON}},
        {"type": "function", "function": {"name": "wait"}},
    ]
    for seed in range(6):
        constraint = force_calls("required", tools, form, TOKENIZER, parallel=False)
        assert constraint is not None
        done = run(
            constraint, SAMPLINGS["plain"], registry.create("grammar", vocab_size=SIZE), rule_seed=seed
        )
        parser = ToolCallParser(form, ("look_up", "wait"))
        parts = [*(parser.push(char) for char in done.text), parser.finish()]
        pieces = [piece for part in parts for piece in part.calls]
        assert done.finish_reason == "stop"
        assert "".join(part.content for part in parts) == ""
        assert {piece.index for piece in pieces} == {0}
        arguments = json.loads("".join(piece.arguments for piece in pieces))
        jsonschema.validate(
            arguments, {"look_up": PERSON, "wait": {"maxProperties": 0}}[pieces[0].name or ""]
        )
