"""Prompts to measure with, from public sets on disk or from the small set beside these scripts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.engine import LLM
from paceline.tools import prompts
from paceline.tools.prompts import Prompt

OWN_PROMPTS = Path(__file__).resolve().parents[1] / "prompts.jsonl"

EDITS = (
    "Rename the function `{name}` to `{name}_v2` and print the whole code again.",
    "Add type hints to all parameters and return values, and print the whole code again.",
    "Add a comment above every loop and every return statement, and print the whole code again.",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as the token ids that every engine is given.

    Attributes:
        group: the prompt set it belongs to; a peer's best setting is chosen for each set.
    """

    group: str
    prompt: Prompt
    ids: list[int]


def collect(
    llm: LLM, *, spec_bench: Path | None, human_eval: Path | None, per_category: int | None, longest: int
) -> list[Task]:
    """Tasks from the sets given, or from our own prompts if none is.

    Categories take turns, so that a run that drifts does so for all of them.

    Args:
        per_category: most prompts of a category, evenly spread over its file.
        longest: prompts of more tokens are left out.
    """
    groups: dict[str, list[Prompt]] = {}
    if spec_bench is not None:
        groups["spec-bench"] = [_as_chat(prompt) for prompt in prompts.load(spec_bench)]
    if human_eval is not None:
        groups["humaneval"] = [replace(prompt, category="completion") for prompt in prompts.load(human_eval)]
        groups["edits"] = edits(human_eval)
    if not groups:
        groups["own"] = [_as_chat(prompt) for prompt in prompts.load(OWN_PROMPTS)]
    tasks = [Task(group, prompt, encode(llm, prompt)) for group, some in groups.items() for prompt in some]
    return spread([task for task in tasks if len(task.ids) <= longest], per_category)


def edits(human_eval: Path) -> list[Prompt]:
    """HumanEval's solutions with a request to change them: what coding assistants are asked all day."""
    found = []
    for number, line in enumerate(human_eval.read_text(encoding="utf-8").splitlines()):
        item: dict[str, Any] = json.loads(line)
        instruction = EDITS[number % len(EDITS)].format(name=item["entry_point"])
        text = f"{instruction}\n\n```python\n{item['prompt']}{item['canonical_solution']}```"
        found.append(_as_chat(Prompt(f"{item['task_id']} edit", "edit", text)))
    return found


def spread(tasks: list[Task], per_category: int | None) -> list[Task]:
    """At most `per_category` tasks of each category, evenly spaced, the categories taking turns."""
    categories: dict[str, list[Task]] = {}
    for task in tasks:
        categories.setdefault(task.prompt.category, []).append(task)
    picked = [pick(some, per_category) for some in categories.values()]
    longest = max(map(len, picked), default=0)
    return [some[place] for place in range(longest) for some in picked if place < len(some)]


def pick(items: list[Task], most: int | None) -> list[Task]:
    """At most `most` items, evenly spaced."""
    if most is None or len(items) <= most:
        return items
    return [items[i * len(items) // most] for i in range(most)]


def encode(llm: LLM, prompt: Prompt) -> list[int]:
    """Token ids: through the model's chat template, or as plain text where there are no messages."""
    if prompt.messages is None or llm.chat_template is None:
        return llm.tokenize(prompt.text)
    return llm.chat_template.encode(llm.tokenizer, prompt.messages)


def _as_chat(prompt: Prompt) -> Prompt:
    return replace(prompt, messages=prompt.as_messages())
