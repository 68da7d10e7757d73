"""`paceline check MODEL`"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.display import count_progress
from paceline.cli.loading import load, locate
from paceline.cli.options import DEMO_MODEL, MachineFlags, Model, Quantize, Threads
from paceline.cli.verb import verb
from paceline.tools.check import RowFault, TextFault, row_faults, text_faults


@verb
def command(
    model: Model = DEMO_MODEL,
    *,
    cases: Annotated[int, typer.Option("--cases", min=1, help="Random requests to compare")] = 40,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Of the random requests")] = 0,
    threads: Threads = None,
    quantize: Quantize = None,
    json: Annotated[bool, typer.Option("--json", help="Print one object")] = False,
) -> int:
    from paceline.models.target import NativeTarget
    from paceline.weights.source import open_model

    rows: list[RowFault | None] = []
    with open_model(locate(model), quantize) as file:
        rows += row_faults(NativeTarget.load(file, threads=threads), seed=seed)
    llm, _, _ = load(model, MachineFlags(threads=threads, quantize=quantize), "off")
    texts: list[TextFault | None] = []
    with count_progress("Comparing", cases) as step:
        for fault in text_faults(llm, cases=cases, seed=seed):
            texts.append(fault)
            step()
    wrong_rows = [asdict(f) for f in rows if f is not None]
    wrong_texts = [asdict(f) for f in texts if f is not None]
    if json:
        terminal.write_json(
            {
                "row_groups": len(rows),
                "row_faults": wrong_rows,
                "cases": cases,
                "text_faults": wrong_texts,
                "identical": not (wrong_rows or wrong_texts),
            }
        )
    else:
        terminal.write(_verdict("passes of 2 to 40 rows against passes of one row", wrong_rows))
        terminal.write(_verdict(f"{cases} random requests with and without speculation", wrong_texts))
    return 1 if wrong_rows or wrong_texts else 0


def _verdict(what: str, faults: list[dict[str, Any]]) -> str:
    if not faults:
        return f"identical: {what}\n"
    return f"DIFFERENT: {what}: {len(faults)} faults, the first: {faults[0]}\n"
