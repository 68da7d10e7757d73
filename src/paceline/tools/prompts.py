"""Prompt files: one JSON object per line, in the shapes that public prompt sets use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: chat messages, or plain text where `messages` is None."""

    name: str
    category: str
    text: str
    messages: list[Message] | None = None

    def as_messages(self) -> list[Message]:
        return self.messages if self.messages is not None else [{"role": "user", "content": self.text}]

    def for_server(self, *, chat: bool) -> tuple[str, dict[str, Any]]:
        """The OpenAI route below `/v1`, and what the prompt is in its body."""
        if chat:
            return "/chat/completions", {"messages": self.as_messages()}
        return "/completions", {"prompt": self.text}


def load(path: Path) -> list[Prompt]:
    """Read a prompt file.

    A line has `messages` (OpenAI style), `turns` (Spec-Bench; the first turn is the prompt) or `prompt`
    (HumanEval), and may have a `category` and an `id`, `question_id` or `task_id`.

    Raises:
        UsageError: the file cannot be read, or a line is none of these; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read prompts from {path}: {error}", "give a JSON Lines file in UTF-8"
        ) from None
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"{path} holds no prompts", "write one JSON object per line")
    names = {p.name for p in prompts}
    if len(names) < len(prompts):
        raise UsageError(
            f"{path}: {len(prompts)} prompts but {len(names)} names", "give every line its own id"
        )
    return prompts


def choose(prompts: list[Prompt], limit: int | None, seed: int | None) -> list[Prompt]:
    """Take at most `limit` prompts, evenly over the categories; shuffled within each when `seed` is given.

    The first prompt of every category comes first, then the second of each, and so on: a short run still
    sees every kind of prompt, and no category sits in one stretch of a machine that gets warm.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    if seed is not None:
        for name, group in groups.items():
            random.Random(f"{seed} {name}").shuffle(group)
    return list(_round_robin(list(groups.values())))[:limit]


def _round_robin(groups: list[list[Prompt]]) -> Iterator[Prompt]:
    for place in range(max(map(len, groups), default=0)):
        yield from (group[place] for group in groups if place < len(group))


def _parse(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", "write one JSON object per line") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object", "write one JSON object per line")
    names = (value[key] for key in ("id", "question_id", "task_id") if key in value)
    name = str(next(names, where.rsplit(":", 1)[-1]))
    category = str(value.get("category", "code" if "entry_point" in value else "all"))
    match value:
        case {"messages": [*messages]} if messages and all(isinstance(m, dict) for m in messages):
            return Prompt(name, category, str(messages[-1].get("content", "")), messages)
        case {"turns": [str(first), *_]} | {"prompt": str(first)}:
            return Prompt(name, category, first)
    raise UsageError(f"{where} has no messages, turns or prompt", 'write {"prompt": "..."} at least')
