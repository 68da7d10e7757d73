"""`paceline pull MODEL`"""

from __future__ import annotations

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
        terminal.write_json({"model": model, "path": str(path), "bytes": path.stat().st_size})
    else:
        terminal.write(f"{path}\n")
