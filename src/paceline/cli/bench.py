"""`paceline bench MODEL --prompts FILE.jsonl`"""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.display import count_progress, stdout
from paceline.cli.loading import load
from paceline.cli.options import DEMO_MODEL, MachineFlags, Model, SamplingFlags, list_flag, split_specs
from paceline.cli.verb import verb
from paceline.errors import ResourceError, UsageError
from paceline.tools import prompts as prompt_files
from paceline.tools.provenance import describe_file, provenance

if TYPE_CHECKING:
    from paceline.tools.bench import Report
    from paceline.tools.statistics import Figures, SpeedUp, Summary

HEADINGS = (
    "category",
    "arm",
    "tokens/s",
    "speed-up",
    "95 %",
    "tokens/pass",
    "accepted",
    "prefill/s",
    "first ms",
)


@dataclass(frozen=True, kw_only=True)
class ArmFlags:
    speculate: Annotated[
        list[str],
        list_flag("--speculate", help="The arms: off, auto, NAME[:key=value,...]; + joins drafters"),
    ] = field(default_factory=list)


@verb
def command(
    model: Model = DEMO_MODEL,
    *,
    prompts: Annotated[Path, typer.Option("--prompts", "-p", help="JSON Lines: turns, prompt or messages")],
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="Also measure this OpenAI-compatible server: [NAME=]URL; repeatable"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Prompts, taken evenly by category")
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option("--shuffle", help="Shuffle within categories by this seed")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Times through the prompts")] = 1,
    warm: Annotated[bool, typer.Option("--warm", help="Let drafters learn from the other prompts")] = False,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the model's chat template; default: if the file has one"),
    ] = None,
    # Other verbs' PACELINE_JSON is a switch, and must not become the name of a file.
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write everything here; - is stdout", allow_from_autoenv=False),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here")] = None,
    sampling: SamplingFlags,
    arms: ArmFlags,
    machine: MachineFlags,
) -> int:
    from paceline.models.target import physical_cores
    from paceline.tools.bench import Arm, EngineArm, parse_speculation, run
    from paceline.tools.peer import ServerArm

    _check_outputs(json, html)
    if warm and repeat > 1:
        raise UsageError("--warm with --repeat would let drafters replay answers", "use one of them")
    params = sampling.params(max_tokens=128 if sampling.max_tokens is None else sampling.max_tokens)
    chosen = prompt_files.choose(prompt_files.load(prompts), limit, shuffle)
    specs = [spec for text in arms.speculate or ["off,auto"] for spec in split_specs(text)]
    for spec in specs:
        parse_speculation(spec)  # a typo shows before gigabytes are read
    servers = [ServerArm(url, name) for name, url in map(_named, against or [])]
    llm, path, load_s = load(model, machine, "off")
    chat = llm.chat_template is not None if chat is None else chat
    rivals: list[Arm] = [*(EngineArm(llm, spec, warm=warm) for spec in specs), *servers]
    with count_progress("Measuring", len(chosen) * len(rivals) * repeat) as step:
        report = run(rivals, chosen, params, chat=chat, repeat=repeat, progress=step)
    about = {
        "provenance": provenance(),
        "model": describe_file(path) | {"load_s": load_s},
        "settings": {
            "prompts": prompts.name,
            "chat": chat,
            "repeat": repeat,
            "limit": limit,
            "shuffle": shuffle,
        }
        | {
            "threads": machine.threads or physical_cores(),
            "sampling": {k: getattr(params, k) for k in params.__dataclass_fields__},
        },
    }
    if json is None or str(json) != "-":
        stdout().print(table(report))
    _notes(report)
    if json is not None:
        _write(json, jsonlib.dumps(report.as_json() | about, ensure_ascii=False, indent=1) + "\n")
    if html is not None:
        from paceline.tools.report import page

        _write(html, page(report, about))
    return 1 if report.differences or not report.overall.figures else 0


def table(report: Report) -> Any:
    """Every arm in every category, and overall."""
    from rich.table import Table

    result = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        result.add_column(
            heading, justify="left" if heading in ("category", "arm") else "right", no_wrap=True
        )
    sections = dict(report.categories) if len(report.categories) > 1 else {}
    for category, summary in (sections | {"overall": report.overall}).items():
        for row in _rows(category, summary):
            result.add_row(*row)
    return result


def _rows(category: str, summary: Summary) -> list[tuple[str, ...]]:
    return [
        (category if i == 0 else "", arm, *_cells(figures, summary.speed_ups[arm], first=i == 0))
        for i, (arm, figures) in enumerate(summary.figures.items())
    ]


def _cells(figures: Figures, speed_up: SpeedUp | None, *, first: bool) -> tuple[str, ...]:
    accepted, ttft = figures.acceptance, figures.time_to_first_token_s
    ratio = interval = ""
    if speed_up is not None and not first:
        ratio = f"{speed_up.ratio:.2f}x"
        interval = f"{speed_up.low:.2f} to {speed_up.high:.2f}" if speed_up.low and speed_up.high else ""
    return (
        _number(figures.decode_tokens_per_s, 1),
        ratio,
        interval,
        "" if accepted is None else f"{accepted.mean_acceptance_length:.2f}",
        "" if accepted is None or not accepted.drafted else f"{accepted.accepted}/{accepted.drafted}",
        _number(figures.prefill_tokens_per_s, 0),
        _number(None if ttft is None else ttft.p50 * 1e3, 0),
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _notes(report: Report) -> None:
    own = [arm for arm, clock in report.decode_clocks.items() if clock == "engine"]
    if not report.differences and len(own) > 1:
        terminal.note(f"identical: {', '.join(own)} wrote the same tokens for every prompt")
    for d in report.differences:
        terminal.note(f"DIFFERENT: prompt {d.prompt}: {d.arm} leaves {d.reference} at {d.unit} {d.index}")
    if report.peer_differences:
        prompts = len({(d.arm, d.prompt) for d in report.peer_differences})
        terminal.note(f"other engines' arithmetic is their own: {prompts} of their texts differ from ours")
    for f in report.failures:
        terminal.note(f"failed, and left out for every arm: prompt {f.prompt} on {f.arm}: {f.message}")
    for arm, clock in report.decode_clocks.items():
        if clock != "engine":
            terminal.note(f"{arm}: tokens from usage, decode time from {clock}")


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else ("", text)


def _check_outputs(*paths: Path | None) -> None:
    """Before an hour of measuring, not after it."""
    for path in paths:
        if path is not None and str(path) != "-" and not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", "make it first")


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        terminal.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error}", "choose another place") from None
    terminal.note(f"wrote {path}")
