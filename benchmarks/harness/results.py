"""How results are written down: one JSON with everything, one small table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.tools.provenance import provenance

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write(name: str, result: dict[str, Any], markdown: str, folder: Path = RESULTS) -> None:
    """Write `name`.json with provenance, and `name`.md; what was there before is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = provenance()
    # Where files lie on one machine tells others nothing; their names and hashes do.
    origin["argv"] = [Path(word).name if Path(word).is_absolute() else word for word in origin["argv"]]
    whole = {"provenance": origin} | result
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")
    print(markdown)
    print(f"written to {folder / name}.json and .md")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats are shown with three significant digits, None as a dash."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)
