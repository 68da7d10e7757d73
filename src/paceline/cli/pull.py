"""`paceline pull MODEL`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import terminal
from paceline.cli.display import byte_progress
from paceline.cli.options import Model
from paceline.cli.verb import verb
from paceline.weights import hub


@verb
def command(
    model: Model,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print {model, path, bytes}")] = False,
) -> None:
    with byte_progress(f"Fetching {model}") as progress:
        path = hub.pull(model, progress)
    if json:
        terminal.write_json({"model": model, "path": str(path), "bytes": _size(path)})
    else:
        terminal.write(f"{path}\n")


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
