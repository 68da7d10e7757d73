"""What every benchmark of `paceline bench` is told: which prompts, and where the report goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from paceline.cli import terminal
from paceline.cli.display import stdout
from paceline.errors import ResourceError, UsageError
from paceline.tools import prompts as prompt_files
from paceline.tools.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """What is measured, and how often."""

    prompts: Annotated[Path, typer.Option("--prompts", "-p", help="JSON Lines: turns, prompt or messages")]
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts, taken evenly by category")] = (
        None
    )
    shuffle: Annotated[
        int | None, typer.Option("--shuffle", help="Shuffle within categories by this seed")
    ] = None
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Times through the prompts")] = 1
    warm: Annotated[bool, typer.Option("--warm", help="Let drafters learn from the other prompts")] = False
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the model's chat template; default: if the file has one"),
    ] = None

    def load(self) -> list[Prompt]:
        if self.warm and self.repeat > 1:
            raise UsageError("--warm with --repeat would let drafters replay answers", "use one of them")
        return prompt_files.choose(prompt_files.load(self.prompts), self.limit, self.shuffle)


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Where the report goes."""

    # Other verbs' PACELINE_JSON is a switch, and must not become the name of a file.
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write everything here; - is stdout", allow_from_autoenv=False),
    ] = None
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here")] = None

    def check(self) -> None:
        """Before an hour of measuring, not after it."""
        for path in (self.json, self.html):
            if path is not None and str(path) != "-" and not path.parent.is_dir():
                raise UsageError(f"there is no folder {path.parent}", "make it first")

    def publish(
        self, shown: Table, notes: Callable[[], None], everything: dict[str, Any], page: Callable[[], str]
    ) -> None:
        """Show the table, unless JSON takes its place, and the notes; write what was asked for."""
        if self.json is None or str(self.json) != "-":
            stdout().print(shown)
        notes()
        if self.json is not None:
            _write(self.json, json.dumps(everything, ensure_ascii=False, indent=1) + "\n")
        if self.html is not None:
            _write(self.html, page())


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        terminal.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error}", "choose another place") from None
    terminal.note(f"wrote {path}")
