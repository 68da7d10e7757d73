"""Constraints against oracles: what they let through is valid, and what is valid they let through."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.text import grammar
from paceline.text.grammar import GrammarConstraint, compile_constraint
from support.grammars import RandomSchema, allowed, choices, json_tokenizer, spell_out, wander
from support.tiny_tokenizer import metadata

TOKENIZER = json_tokenizer()
END = TOKENIZER.eos_id
SPECIAL = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.is_special(token)]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["red", "green"]}, "is": {"type": "boolean"}},
    "required": ["name", "kind", "is"],
    "additionalProperties": False,
}


def made(kind: Any, source: Any = None) -> GrammarConstraint:
    return compile_constraint(kind, source, TOKENIZER)


def writes(kind: Any, source: Any, text: str) -> bool:
    return spell_out(made(kind, source), TOKENIZER, text) is not None


def refused(kind: Any, source: Any) -> str:
    with pytest.raises(RequestError) as caught:
        made(kind, source)
    assert caught.value.hint or kind == "json_object"
    return caught.value.message


@pytest.mark.parametrize("block", range(10))
def test_whatever_a_schema_lets_through_is_valid(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        schema = RandomSchema(seed).schema
        constraint = made("json_schema", schema)
        for walk in range(2):
            tokens, ended = wander(constraint.fresh(), TOKENIZER, random.Random(walk), steps=1500)
            text = TOKENIZER.decode(tokens, skip_special=False)
            if ended:
                jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
            else:  # a number that never ends is all that takes so long
                assert re.search(r"\d{50}", text)


@pytest.mark.parametrize("block", range(5))
def test_whatever_is_valid_can_be_written(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        made_up = RandomSchema(seed)
        constraint = made("json_schema", made_up.schema)
        value = made_up.value()
        jsonschema.validate(value, made_up.schema, jsonschema.Draft202012Validator)
        text = json.dumps(value, ensure_ascii=False)
        assert spell_out(constraint, TOKENIZER, text) is not None, (made_up.schema, text)


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    for seed in range(10):
        tokens, ended = wander(made("json_object"), TOKENIZER, random.Random(seed), steps=300)
        text = TOKENIZER.decode(tokens, skip_special=False)
        assert text.startswith("{")
        assert not ended or isinstance(json.loads(text), dict)
    assert writes("json_object", None, '{"a": [1, -2.5e3, {"b": null}], "é": "\\n"}')
    assert not writes("json_object", None, "[1]")
    assert not writes("json_object", None, '{"a": 1} ')
    assert not writes("json_object", None, '{"a": 01}')


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"\d{3}-[a-c]+", ["123-abc", "000-a"], ["12-a", "123-", "123-d"]),
        (r"(yes|no)!?", ["yes", "no!"], ["maybe", "yes!!"]),
        (r"[^\n]*é", ["é", "aé"], ["a", "\né"]),
    ],
)
def test_an_expression_is_matched_as_a_whole(pattern: str, yes: list[str], no: list[str]) -> None:
    assert all(writes("regex", form, text) for text in yes for form in (pattern, f"^{pattern}$"))
    assert not any(writes("regex", pattern, text) for text in no)
    for seed in range(5):
        tokens, ended = wander(made("regex", pattern), TOKENIZER, random.Random(seed), steps=200)
        assert not ended or re.fullmatch(pattern, TOKENIZER.decode(tokens, skip_special=False))


def test_choices_are_exactly_these() -> None:
    texts = ["yes", "yes please", "no", 'a"b\\', "é😀", " x\n", "</s>"]
    found = set()
    for seed in range(200):
        tokens, ended = wander(made("choice", texts), TOKENIZER, random.Random(seed))
        assert ended
        found.add(TOKENIZER.decode(tokens, skip_special=False))
    assert found == set(texts)


@pytest.mark.parametrize(
    "source",
    [
        'start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[a-z]+/',
        'root ::= ("hi" | "hello") " " [a-z]+',
    ],
    ids=["lark", "gbnf"],
)
def test_grammars_in_both_notations(source: str) -> None:
    assert writes("grammar", source, "hello bob")
    assert not writes("grammar", source, "hey bob")
    assert not writes("grammar", source, "hi ")


def test_json_stands_on_one_line_unless_the_schema_asks_otherwise() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert writes("json_schema", schema, '{"a": 1}')
    assert not writes("json_schema", schema, '{\n  "a": 1\n}')
    own = {**schema, "x-guidance": {"whitespace_flexible": True, "key_separator": ":"}}
    assert writes("json_schema", own, '{\n  "a": 1\n}')


def test_a_schema_may_be_text_a_mapping_or_true() -> None:
    schema = {"type": "boolean"}
    assert writes("json_schema", json.dumps(schema), "true")
    assert writes("json_schema", schema, "false")
    assert writes("json_schema", True, '[{"a": null}]')
    assert writes("json_schema", {}, "12")


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "regex"])
def test_no_text_turns_into_a_special_token(kind: Any) -> None:
    """Only an end is ever allowed among them, and only where the text may end."""
    source = {"json_object": None, "json_schema": {"type": "string"}, "regex": r"[ -~]*"}[kind]
    for seed in range(5):
        constraint, rng = made(kind, source), random.Random(seed)
        for _ in range(60):
            now = choices(constraint, TOKENIZER)
            ends = [token for token in now if token in SPECIAL]
            assert set(ends) <= TOKENIZER.eog_ids
            assert bool(ends) == (kind == "regex") or constraint.stopped
            plain = [token for token in now if token not in SPECIAL]
            if not plain:
                break
            constraint.advance(rng.choice(plain))
    assert writes("regex", r"[ -~]*", "a</s><|other|>")


def test_where_one_text_can_follow_its_tokens_are_forced_one_by_one() -> None:
    constraint = made("json_schema", PERSON)
    run = constraint.forced()
    assert TOKENIZER.decode(run).startswith('{"name')
    for i, token in enumerate(run):
        assert choices(constraint, TOKENIZER) == [token]
        assert constraint.forced() == run[i:]
        constraint.advance(token)
    assert len(choices(constraint, TOKENIZER)) > 1


def test_a_finished_text_forces_the_end_within_the_run() -> None:
    constraint = made("choice", ["true", "false"])
    start = next(t for t in choices(constraint, TOKENIZER) if TOKENIZER.token_bytes(t) == b"t")
    constraint.advance(start)
    run = constraint.forced()
    assert (TOKENIZER.decode(run[:-1]), run[-1]) == ("rue", END)
    assert not constraint.stopped
    for token in run[:-1]:
        constraint.advance(token)
    assert constraint.stopped
    assert choices(constraint, TOKENIZER) == [END]
    constraint.advance(END)
    assert constraint.stopped
    assert choices(constraint, TOKENIZER) == [END]


def test_every_end_is_open_where_a_text_may_end_or_go_on() -> None:
    constraint = made("regex", "[ab]*")
    assert not constraint.stopped
    assert set(choices(constraint, TOKENIZER)) == {ord("a"), ord("b"), *TOKENIZER.eog_ids}
    constraint.advance(max(TOKENIZER.eog_ids))
    assert constraint.stopped


@pytest.mark.parametrize("seed", range(20))
def test_accepts_agrees_with_the_masks(seed: int) -> None:
    schema = RandomSchema(seed).schema
    tokens, _ = wander(made("json_schema", schema), TOKENIZER, random.Random(seed), steps=60)
    constraint = made("json_schema", schema)
    for at in range(len(tokens)):
        assert constraint.accepts(tokens[at:]) == len(tokens) - at
        possible = allowed(constraint.mask(), TOKENIZER.vocab_size)
        if at % 5 == 0:
            single = [constraint.accepts([token]) for token in range(TOKENIZER.vocab_size)]
            np.testing.assert_array_equal(np.array(single, np.bool_), possible)
        wrong = int(np.flatnonzero(~possible)[seed % np.count_nonzero(~possible)])
        assert constraint.accepts([wrong, *tokens]) == 0
        constraint.advance(tokens[at])


@pytest.mark.parametrize("seed", range(20))
def test_a_text_written_again_meets_the_same_masks(seed: int) -> None:
    """Whether or not anybody asked for a mask, a run or a forecast on the way."""
    schema, rng = RandomSchema(seed).schema, random.Random(seed)
    first = made("json_schema", schema)
    tokens: list[int] = []
    masks = []
    for _ in range(60):
        masks.append(np.array(first.mask()))
        tokens.append(rng.choice(choices(first, TOKENIZER)))
        first.advance(tokens[-1])
        if tokens[-1] in TOKENIZER.eog_ids:
            break
    for at in range(len(tokens)):
        again = first.fresh()
        for token in tokens[:at]:
            again.advance(token)
        np.testing.assert_array_equal(again.mask(), masks[at])


def test_equal_sources_are_compiled_once_and_stay_independent() -> None:
    one, other = made("choice", ["ab", "cd"]), made("choice", ["ab", "cd"])
    assert one._compiled is other._compiled
    one.advance(ord("a"))
    assert choices(other, TOKENIZER) == [ord("a"), ord("c")]
    assert choices(one, TOKENIZER) == [ord("b")]
    assert choices(one.fresh(), TOKENIZER) == [ord("a"), ord("c")]


def test_many_sources_do_not_pile_up() -> None:
    for i in range(40):
        made("regex", f"a{i}")
    assert len(grammar._compiler(TOKENIZER)._cache) <= 16


def test_the_process_that_tries_grammars_is_replaced_when_it_died() -> None:
    made("regex", "before")
    process = grammar._compiler(TOKENIZER)._worker.process
    assert process is not None
    process.kill()
    process.wait()
    assert writes("regex", "after", "after")


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json", {}, "there is no constraint of kind 'json'"),
        ("json_schema", 5, "the JSON schema is 5"),
        ("json_schema", False, "the JSON schema is false"),
        ("json_schema", "{", "the JSON schema is not valid JSON"),
        ("json_schema", {"minimum": float("nan")}, "the JSON schema holds what JSON cannot"),
        ("json_schema", {"type": "strin"}, "the JSON schema cannot be used: Invalid type: strin"),
        ("json_schema", {"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ("json_schema", {"type": "string", "format": "colour"}, "Unknown format: colour"),
        ("json_schema", {"$ref": "#/$defs/no"}, "Pointer '/$defs/no' does not exist"),
        ("json_schema", {"$ref": "https://example.org/s"}, "https://example.org/s"),
        ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ("regex", 5, "the regular expression is of type int"),
        ("regex", "", "the regular expression is empty"),
        ("regex", "(a", "the regular expression cannot be used"),
        ("regex", "(?=a)b", "the regular expression cannot be used"),
        ("choice", "yes", "the choices are str"),
        ("choice", [], "the list of choices is empty"),
        ("choice", ["a", 5], "the choices hold 5"),
        ("choice", [""], "the choices hold ''"),
        ("choice", ["\ud800"], "the list of choices cannot be used"),
        ("grammar", "start: foo", "the grammar cannot be used"),
        ("grammar", "root ::= (", "the grammar cannot be used"),
        ("grammar", "start: a\na: a", "the grammar cannot be used: no text can match it"),
        ("grammar", 'start: "a" <|nope|>', "unknown special token"),
    ],
)
def test_what_cannot_be_used_is_named(kind: str, source: Any, words: str) -> None:
    assert words in refused(kind, source)


def chain(levels: int, **more: Any) -> str:
    """References that lead on and on."""
    defs = {f"{i}": {"anyOf": [{"$ref": f"#/d/{i + 1}"}, {"const": i}], **more} for i in range(levels)}
    return json.dumps({"d": {**defs, f"{levels}": {"type": "string"}}, "$ref": "#/d/0"})


def rules(name: str, count: int, rule: str) -> str:
    """Rules of which each leads to the next."""
    lines = [f"{name}{i}: " + rule.format(next=f"{name}{i + 1}") for i in range(count)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{count}: "a"'])


CIRCLE = {"d": {"a": {"$ref": "#/d/b"}, "b": {"$ref": "#/d/a"}}, "$ref": "#/d/a"}
BRANCHES = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(25)]
ENDLESS = {"type": "object", "properties": {"c": {"$ref": "#/d/t"}}, "required": ["c"]}
HOSTILE: dict[str, tuple[str, Any]] = {
    "nested schema": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "nested Python": ("json_schema", {"items": json.loads('{"items":' * 400 + "{}" + "}" * 400)}),
    "references 2000 deep": ("json_schema", chain(2000)),
    "reference to itself": ("json_schema", {"$ref": "#"}),
    "references in a circle": ("json_schema", CIRCLE),
    "exploding allOf": ("json_schema", {"allOf": BRANCHES}),
    "too long": ("json_schema", {"enum": [f"value {i}" for i in range(20_000)]}),
    "many choices": ("choice", [f"{i * 7919 % 10007}" for i in range(10_000)]),
    "many properties": ("json_schema", {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}),
    "repetition of repetition": ("regex", "(((a{1000}){1000}){1000})"),
    "states without end": ("regex", "(a|b)*a(a|b){3000}c"),
    "backtracking": ("regex", "(a+)+b"),
    "nested groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "nested rules": ("grammar", rules("r", 5000, '{next} "x"')),
    "nested terminals": ("grammar", rules("T", 5000, '{next} "x"')),
    "doubling rules": ("grammar", rules("r", 60, "{next} {next}")),
    "ambiguity": ("grammar", 'start: s\ns: s s s | "a" | ""'),
    "nested GBNF": ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "an object that never ends": ("json_schema", {"d": {"t": ENDLESS}, "$ref": "#/d/t"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_end_in_an_error_or_do_no_harm(name: str) -> None:
    kind, source = HOSTILE[name]
    error, tokens, ended = None, [], False
    try:
        constraint = compile_constraint(kind, source, TOKENIZER)  # type: ignore[arg-type]
        tokens, ended = wander(constraint, TOKENIZER, random.Random(0), steps=40)
    except RequestError as found:
        error = found
    assert (tokens or ended) if error is None else (error.hint and len(error.message) < 600)


def test_a_process_that_a_grammar_ends_is_an_error_of_that_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too slow and crashed, as the worker's end tells them apart."""
    compiler = grammar._compiler(TOKENIZER)
    for status, words in (
        (-27, "more than 2 seconds"),
        (None, "more than 2 seconds"),
        (-11, "nests too deeply"),
    ):
        monkeypatch.setattr(compiler._worker, "receive", lambda seconds, status=status: status)
        assert words in refused("regex", f"new{status}")
    compiler._worker.close()


def test_a_model_without_an_end_cannot_be_constrained() -> None:
    from paceline.text.tokenizer import Tokenizer

    endless = metadata()
    del endless["tokenizer.ggml.eos_token_id"]
    endless["tokenizer.ggml.tokens"][-1] = "<x>"
    with pytest.raises(RequestError, match="no token that ends a text"):
        compile_constraint("json_object", None, Tokenizer.from_gguf(endless))
