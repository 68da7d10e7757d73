"""Tool calls in text: the same however it is cut, nothing lost, and grammars that enforce them."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.text.json_scan import JsonScanner
from paceline.text.tool_calls import Format, ToolCallParser, detect, force_calls
from support.grammars import json_tokenizer, spell_out, wander

TOKENIZER = json_tokenizer()
TOOLS = ("f", "g")
Call = tuple[str, str, str]


def parse(form: Format, text: str, cuts: list[int] | range = range(0)) -> tuple[str, list[Call]]:
    """(content, [(id, name, arguments)]) of a text pushed in pieces; checks the shape of the stream."""
    ids = count()
    parser = ToolCallParser(form, TOOLS, new_id=lambda: f"call_{next(ids)}")
    parts = []
    at = 0
    for cut in [*cuts, len(text)]:
        parts.append(parser.push(text[at:cut]))
        at = cut
    parts.append(parser.finish())
    calls: list[Call] = []
    for piece in (piece for part in parts for piece in part.calls):
        if piece.id is not None:
            assert piece.name
            calls.append((piece.id, piece.name, ""))
        assert piece.index == len(calls) - 1
        assert (piece.id is None) == (piece.name is None)
        found, name, arguments = calls[-1]
        calls[-1] = (found, name, arguments + piece.arguments)
    assert [found for found, _, _ in calls] == [f"call_{i}" for i in range(len(calls))]
    assert parser.count == len(calls)
    return "".join(part.content for part in parts), calls


ARGUMENTS = '{"a": [1, -2.5e-3, "x</tool_call>\\"{"], "b": {"c": null, "é😀": true}}'
CASES: list[tuple[Format, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text, 1 < 2 and <b>.\n", "Just text, 1 < 2 and <b>.\n", []),
    ("hermes", "", "", []),
    ("hermes", " \n", " \n", []),
    (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "",
        [("f", ARGUMENTS)],
    ),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n'
        '{"arguments": {"q": [ ]}, "name": "g"}\n</tool_call>\n',
        "Let me see.",
        [("f", "{}"), ("g", '{"q": [ ]}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> done', " done", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "odd", "parameters": {"a":1}}', "", [("odd", '{"a":1}')]),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("llama3", '{"name": "f", "parameters": {"a": "}"}}', "", [("f", '{"a": "}"}')]),
    (
        "llama3",
        ' {"name": "f", "arguments": {}}; {"name": "g", "parameters": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3", 'Sure:\n{"name": "f", "parameters": {}}\nBye.', "Sure:\nBye.", [("f", "{}")]),
    ("llama3", 'x {"name": "f", "parameters": {}}', 'x {"name": "f", "parameters": {}}', []),
]
MALFORMED: list[tuple[Format, str, str, list[tuple[str, str]]]] = [
    # Before its arguments came, a call that is none is content, all of it.
    *[
        ("hermes", text, text, [])
        for text in (
            "x\n<tool_call>\n{'name': 'f'}\n</tool_call>\ny",
            "<tool_call>[1]</tool_call>",
            '<tool_call>"f"</tool_call>',
            "<tool_call> </tool_call>",
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": "f", "arg',
            'Text <tool_call>{"name": "f"',
            "a <tool_ca",
            "<tool_call>",
            '<tool_call>{"arguments": {"n": ' + "9" * 5000 + '}, "name": "f"}',
        )
    ],
    *[
        ("llama3", text, text, [])
        for text in (
            '{"a": {"name": "f", "parameters": {}}}',
            '{"name": "unknown", "parameters": {}}',
            '{"name": "f"}',
            "{not JSON}",
            '{"name": "f", "parameters": 1}',
            "<|python_tag|>print(1)",
            "function f() {\n  return 1 }",
            '{"name": "f", "param',
        )
    ],
    # Later it stays as far as it came.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru!}}', "!}}", [("f", '{"a": tru')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} </tool', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}</tool_call>", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{bad}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>{bad}</tool_call>",
        [("f", "{}")],
    ),
    ("llama3", '{"x"\n{"name": "f", "parameters": {}}', '{"x"', [("f", "{}")]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES + MALFORMED)
def test_the_same_however_the_text_is_cut(
    form: Format, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = [(f"call_{i}", *call) for i, call in enumerate(calls)]
    assert parse(form, text) == (content, expected)
    if len(text) > 1000:
        return
    assert parse(form, text, range(len(text))) == (content, expected)
    for cut in range(len(text) + 1):
        assert parse(form, text, [cut]) == (content, expected), cut


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=4), json_values, max_size=3)
SCRAPS = ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f", "', "arguments", '": ', "{}", "}"]
words = st.text("ab <>{}\n\"'_/tool_cal|;", max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(["hermes", "llama3"]),
    calls=st.lists(st.tuples(st.sampled_from(TOOLS), arguments), min_size=1, max_size=3),
    before=st.text("abc .,", max_size=9),
    indent=st.sampled_from([None, 1]),
    data=st.data(),
)
def test_calls_come_back_as_they_were_written(
    form: Format, calls: list[Any], before: str, indent: int | None, data: st.DataObject
) -> None:
    key = "arguments" if form == "hermes" else "parameters"
    written = [json.dumps(a, indent=indent, ensure_ascii=data.draw(st.booleans())) for _, a in calls]
    bodies = [f'{{"name": "{n}", "{key}": {a}}}' for (n, _), a in zip(calls, written, strict=True)]
    if form == "hermes":
        bodies = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
    text = f"{before}\n" + "\n".join(bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    content, found = parse(form, text, cuts)
    assert content == before.rstrip()
    assert [(name, text) for _, name, text in found] == list(zip([n for n, _ in calls], written, strict=True))


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from(["hermes", "llama3"]),
    parts=st.lists(words | st.sampled_from(SCRAPS), max_size=10),
    data=st.data(),
)
@example(form="hermes", parts=["<tool_call>", "<tool_call>", '{"name": "f", "', "arguments"], data=None)
def test_of_any_text_nothing_is_lost_and_cuts_do_not_matter(
    form: Format, parts: list[str], data: st.DataObject | None
) -> None:
    text = "".join(parts)
    whole = parse(form, text)
    if data is not None:
        assert parse(form, text, sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))) == whole
    assert parse(form, text, range(len(text))) == whole
    content, calls = whole
    if not calls:
        assert content == text
    # What comes out is in the text, in its order: content and arguments are cut out of it, not made up.
    assert is_spread_in(content, text)
    assert all(arguments in text or arguments == "{}" for _, _, arguments in calls)


def is_spread_in(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(char in rest for char in part)


@settings(max_examples=300, deadline=None)
@given(value=json_values, indent=st.sampled_from([None, 2]), damage=st.data())
def test_the_scanner_and_the_json_module_agree(value: Any, indent: int | None, damage: st.DataObject) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=False)
    at = damage.draw(st.integers(0, len(text)))
    change = damage.draw(
        st.sampled_from(["", "}", "]", ",", '"', ":", "0", "-", ".", "e", "\\", " ", "t", "{"])
    )
    for candidate in (text, text[:at] + change + text[at + damage.draw(st.integers(0, 1)) :]):
        scanner = JsonScanner()
        taken = next((i for i, char in enumerate(candidate) if not scanner.feed(char)), len(candidate))
        complete = taken == len(candidate) and scanner.expects == "nothing"
        if candidate[:1] == "[":
            assert complete == is_json(candidate.rstrip(" ")) or candidate.endswith(" ")
            # What was taken is the beginning of some JSON text: nothing was let through too far.
            assert completes(scanner, candidate[:taken])


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda word: pytest.skip(word))
    except ValueError:
        return False
    return True


def completes(scanner: JsonScanner, text: str) -> bool:
    """Whether the shortest way on that the scanner names makes JSON of the text."""
    tail = ""
    for _ in range(200):
        if scanner.expects == "nothing":
            return is_json(text + tail)
        char = next(c for c in '"}]:0u1aeflrsn' if _takes(scanner, c))
        scanner.feed(char)
        tail += char
    return False


def _takes(scanner: JsonScanner, char: str) -> bool:
    from copy import deepcopy

    return deepcopy(scanner).feed(char)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("", None),
        ("{{ messages }}", None),
        ("...within <tool_call></tool_call> XML tags:\n<tool_call>\n{...", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3"),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str | None, form: Format | None) -> None:
    assert detect(template) == form


WEATHER = {
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["c", "f"]}},
}
DESCRIBED = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "g"}},
]
ONE = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("form", ["hermes", "llama3"])
@pytest.mark.parametrize("choice", ["required", ONE])
def test_forced_calls_are_calls_that_follow_the_schema(form: Format, choice: Any) -> None:
    names = set()
    for seed in range(30):
        constraint = force_calls(choice, DESCRIBED, form, TOKENIZER)
        assert constraint is not None
        tokens, ended = wander(constraint, TOKENIZER, random.Random(seed))
        assert ended
        content, calls = parse(form, TOKENIZER.decode(tokens, skip_special=False))
        assert content == ""
        assert len(calls) == 1 or (choice == "required" and form == "hermes")
        for _, name, text in calls:
            names.add(name)
            schema = {"f": WEATHER, "g": {"maxProperties": 0}}[name]
            jsonschema.validate(json.loads(text), {"type": "object", **schema})
    assert names == ({"f", "g"} if choice == "required" else {"f"})


def test_calls_are_forced_as_models_write_them() -> None:
    written = '<tool_call>\n{"name": "f", "arguments": {"city": "Bonn", "unit": "c"}}\n</tool_call>'
    for parallel in (True, False):
        for text in (written, f"{written}\n{written}"):
            constraint = force_calls("required", DESCRIBED, "hermes", TOKENIZER, parallel=parallel)
            assert constraint is not None
            possible = spell_out(constraint, TOKENIZER, text) is not None
            assert possible == (parallel or text == written)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_where_the_model_decides_nothing_is_forced(choice: str) -> None:
    assert force_calls(choice, DESCRIBED, "hermes", TOKENIZER) is None


@pytest.mark.parametrize(
    ("choice", "tools", "words"),
    [
        ("required", [], 'tool_choice is "required", and there are no tools'),
        ("always", DESCRIBED, "tool_choice is 'always'"),
        ({"type": "function"}, DESCRIBED, "tool_choice is {'type': 'function'}"),
        ({"type": "function", "function": {"name": "h"}}, DESCRIBED, "tool_choice names 'h'"),
        ("required", [{}], r"tools[0].function.name is None"),
        ("required", [{"function": {"name": 'a"b'}}], "tools[0].function.name is 'a\"b'"),
        ("required", [DESCRIBED[0], DESCRIBED[0]], "two tools are called 'f'"),
        (
            "required",
            [{"function": {"name": "f", "parameters": {"type": "array"}}}],
            "is no schema of an object",
        ),
        ("required", [{"function": {"name": "f", "parameters": 5}}], "tools[0].function.parameters"),
        (
            "required",
            [{"function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}],
            "the description of the tools cannot be used",
        ),
    ],
)
def test_what_cannot_be_forced_is_named(choice: Any, tools: list[Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        force_calls(choice, tools, "hermes", TOKENIZER)
    assert words in caught.value.message
    assert caught.value.hint
