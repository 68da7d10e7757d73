"""Which prompts are measured, and in what order."""

from __future__ import annotations

import json
from pathlib import Path

from harness.tasks import OWN_PROMPTS, Task, edits, pick, spread

from paceline.tools import prompts
from paceline.tools.prompts import Prompt


def task(name: str, category: str) -> Task:
    return Task("set", Prompt(name, category, name), [1])


def test_picks_are_spread_evenly_over_the_file() -> None:
    some = [task(str(i), "a") for i in range(10)]
    assert [t.prompt.name for t in pick(some, 3)] == ["0", "3", "6"]
    assert pick(some, 10) == pick(some, 99) == pick(some, None) == some


def test_categories_take_turns() -> None:
    some = [task("a1", "a"), task("a2", "a"), task("a3", "a"), task("b1", "b")]
    assert [t.prompt.name for t in spread(some, None)] == ["a1", "b1", "a2", "a3"]
    assert [t.prompt.name for t in spread(some, 1)] == ["a1", "b1"]


def test_edits_ask_for_the_whole_code_three_ways(tmp_path: Path) -> None:
    path = tmp_path / "humaneval.jsonl"
    item = {"entry_point": "f", "prompt": "def f(x):\n", "canonical_solution": "    return x\n"}
    path.write_text("".join(json.dumps({"task_id": f"H/{i}", **item}) + "\n" for i in range(3)))
    found = edits(path)
    assert [prompt.name for prompt in found] == ["H/0 edit", "H/1 edit", "H/2 edit"]
    assert all(prompt.text.endswith("```python\ndef f(x):\n    return x\n```") for prompt in found)
    assert found[0].text.startswith("Rename the function `f` to `f_v2` and print the whole code again.")
    assert len({prompt.text for prompt in found}) == 3
    assert found[0].messages == [{"role": "user", "content": found[0].text}]


def test_our_own_prompts_can_be_read() -> None:
    own = prompts.load(OWN_PROMPTS)
    assert len(own) >= 20
    assert len({prompt.category for prompt in own}) >= 4
