from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tools.prompts import Prompt, choose, load


def write(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def test_every_public_shape_is_read(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        "",
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "pass"},
        {"id": "m", "messages": messages},
        {"prompt": "no name"},
    )
    assert load(path) == [
        Prompt("81", "writing", "first"),
        Prompt("HumanEval/0", "code", "def f():\n"),
        Prompt("m", "all", "Hi", messages),
        Prompt("5", "all", "no name"),
    ]
    assert load(path)[0].as_messages() == [{"role": "user", "content": "first"}]
    assert load(path)[2].as_messages() == messages


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", ":1 is not JSON"),
        ("[" * 100_000, ":1 is not JSON"),
        ("[1]", ":1 is not a JSON object"),
        ({"turns": []}, ":1 has no messages"),
        ({"turns": [7]}, ":1 has no messages"),
        ({"messages": []}, ":1 has no messages"),
        ({"question": "?"}, ":1 has no messages"),
        ("", "holds no prompts"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(write(tmp_path, row))


def test_unreadable_files_and_repeated_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read prompts"):
        load(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UsageError, match="cannot read prompts"):
        load(tmp_path / "latin.jsonl")
    with pytest.raises(UsageError, match="2 prompts but 1 names"):
        load(write(tmp_path, {"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}))


def test_a_limit_takes_from_every_category() -> None:
    prompts = [Prompt(f"{c}{i}", c, "") for c in "abc" for i in range(4)]
    assert [p.name for p in choose(prompts, 5, None)] == ["a0", "b0", "c0", "a1", "b1"]
    assert {p.category for p in choose(prompts, 3, 7)} == {"a", "b", "c"}
    assert choose(prompts, None, 7) == choose(prompts, None, 7) != choose(prompts, None, 8)
    assert sorted(p.name for p in choose(prompts, None, 7)) == sorted(p.name for p in prompts)
