"""Tables and progress, through rich; apart from `terminal` because rich takes a while to import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli.terminal import note

PIPE_WIDTH = 160


class QuietConsole(Console):
    """A console that leaves a closed pipe to the verb's guard, which ends the program without a word."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """For tables that are the answer; wide enough for them when it is not a terminal."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return QuietConsole(file=sys.stdout, width=width, highlight=False)


def stderr() -> Console:
    return QuietConsole(file=sys.stderr, highlight=False)


def waiting(label: str) -> AbstractContextManager[Any]:
    """Something that moves on a terminal while the body runs; elsewhere nothing."""
    console = stderr()
    return console.status(label) if console.is_terminal else nullcontext()


@contextmanager
def byte_progress(label: str) -> Iterator[Any]:
    """Yield a callback (bytes so far, bytes in all); shows a bar on a terminal, else one line."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task: Any = None

        def advance(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task(label, total=total)
                if bar.disable:
                    note(f"{label} ({total / 1e6:.0f} MB)")
            bar.update(task, completed=done)

        yield advance


@contextmanager
def count_progress(label: str, total: int) -> Iterator[Any]:
    """Yield a callback to call after each of `total` things."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
