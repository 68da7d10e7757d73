"""`paceline check MODEL [DRAFT]`"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.display import count_progress, waiting
from paceline.cli.loading import load, locate
from paceline.cli.options import DEMO_MODEL, MachineFlags, Model, Quantize, Threads
from paceline.cli.verb import verb
from paceline.tools.check import PROMPTS, SPECULATIONS, RowFault, TextFault, row_faults, text_faults

if TYPE_CHECKING:
    from paceline.engine import LLM
    from paceline.tools.pair import Gain, PairReport


@verb
def command(
    model: Model = DEMO_MODEL,
    draft: Annotated[
        str | None, typer.Argument(help="A draft model: can the two work together, and would it pay?")
    ] = None,
    *,
    cases: Annotated[int, typer.Option("--cases", min=1, help="Random requests to compare")] = 40,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Of the random requests")] = 0,
    threads: Threads = None,
    quantize: Quantize = None,
    json: Annotated[bool, typer.Option("--json", help="Print one object")] = False,
) -> int:
    from paceline.drafters.beside import find_drafters
    from paceline.models.target import NativeTarget
    from paceline.weights.source import open_model

    report = _inspect(model, draft, quantize) if draft else None
    if report is not None and not json:
        terminal.write(_pair_text(report))
    if report is not None and report.obstacles:
        if json:
            terminal.write_json({"pair": _pair_json(report, None)})
        return 1
    rows: list[RowFault | None] = []
    with open_model(locate(model), quantize) as file:
        drafters = [found.describe(file.path) for found in find_drafters(file)]
        rows += row_faults(NativeTarget.load(file, threads=threads), seed=seed)
    llm, _, _ = load(model, MachineFlags(threads=threads, quantize=quantize), "off")
    gain = _gain(llm, str(locate(draft))) if draft else None
    specs = SPECULATIONS if draft is None else (*SPECULATIONS, *_draft_specs(str(locate(draft))))
    texts: list[TextFault | None] = []
    with count_progress("Comparing", cases) as step:
        for fault in text_faults(llm, cases=cases, seed=seed, speculations=specs):
            texts.append(fault)
            step()
    wrong_rows = [asdict(f) for f in rows if f is not None]
    wrong_texts = [asdict(f) for f in texts if f is not None]
    same = not (wrong_rows or wrong_texts) and (gain is None or gain.identical)
    if json:
        found = {
            "row_groups": len(rows),
            "row_faults": wrong_rows,
            "cases": cases,
            "text_faults": wrong_texts,
            "identical": same,
            "drafters": drafters,
        }
        terminal.write_json(found | ({"pair": _pair_json(report, gain)} if report else {}))
    else:
        if gain is not None:
            terminal.write(_gain_text(gain))
        terminal.write("".join(f"drafter     {found}\n" for found in drafters))
        terminal.write(_verdict("passes of 2 to 40 rows, over one sequence and several", wrong_rows))
        terminal.write(_verdict(f"{cases} random requests with and without speculation", wrong_texts))
    return 0 if same else 1


def _inspect(model: str, draft: str, quantize: str | None) -> PairReport:
    from paceline.tools.pair import inspect_pair
    from paceline.weights.source import open_model

    with open_model(locate(model), quantize) as target, open_model(locate(draft)) as other:
        return inspect_pair(target, other)


def _gain(llm: LLM, draft: str) -> Gain:
    from paceline.tools.pair import measure_gain

    with waiting("Drafting"):
        return measure_gain(llm, draft, PROMPTS)


def _draft_specs(draft: str) -> list[str]:
    spec = f"model:{draft}"
    return [spec, *(f"{spec},num_speculative_tokens={n}" for n in (1, 5))]


def _pair_json(report: PairReport | None, gain: Gain | None) -> dict[str, Any]:
    assert report is not None
    memory = {"total": report.memory.total, "available": report.memory.available}
    found = asdict(report) | {"memory": memory, "remedy": report.comparison.remedy()}
    return found | {"gain": None if gain is None else asdict(gain) | {"pays": gain.pays}}


def _pair_text(report: PairReport) -> str:
    c, memory = report.comparison, report.memory
    lines = [
        f"target      {report.target}: {c.target_size} ids, {c.target_padding} of them padding; "
        f"context {report.contexts[0]}",
        f"draft       {report.draft}: {c.draft_size} ids, {c.draft_padding} of them padding; "
        f"context {report.contexts[1]}",
        f"vocabulary  {c.equal} ids equal, {len(c.differing)} differ, {len(c.target_only)} are the target's, "
        f"{len(c.draft_only)} the draft's alone; {len(c.specials)} of all these are control tokens",
        f"            {c.shared} draft ids have a token in the target, {c.coverage:.1%} of a sample text",
    ]
    lines += [f"            id {d.token}: {d.target!r} and {d.draft!r}" for d in c.examples]
    lines.append(f"drafts by   {c.mode}. {c.remedy()}")
    lines.append(
        f"memory      {memory.total / 2**20:.0f} of {memory.available / 2**20:.0f} MiB for both, "
        f"{memory.context} tokens of text included"
    )
    lines += [f"note        {note}" for note in report.notes]
    lines += [f"CANNOT WORK {obstacle}" for obstacle in report.obstacles]
    return "\n".join(lines) + "\n"


def _gain_text(gain: Gain) -> str:
    verdict = (
        f"pays: {gain.best_length} tokens per pass" if gain.pays else "does not pay: it will be left alone"
    )
    return (
        f"costs       drafting one {gain.draft_cost:.2f}, checking one {gain.row_cost:.2f} of a plain\n"
        f"accepted    {gain.acceptance:.0%} of drafted tokens; {gain.break_even:.0%} would break even\n"
        f"forecast    {gain.forecast:.2f} times as fast; {verdict}\n"
        f"measured    {gain.measured:.2f} times as fast, {gain.mean_acceptance_length:.2f} tokens per pass\n"
    )


def _verdict(what: str, faults: list[dict[str, Any]]) -> str:
    if not faults:
        return f"identical: {what}\n"
    return f"DIFFERENT: {what}: {len(faults)} faults, the first: {faults[0]}\n"
