"""`paceline bench MODEL --prompts FILE.jsonl`"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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

    def load(self) -> list[prompt_files.Prompt]:
        if self.warm and self.repeat > 1:
            raise UsageError("--warm with --repeat would let drafters replay answers", "use one of them")
        return prompt_files.choose(prompt_files.load(self.prompts), self.limit, self.shuffle)


@dataclass(frozen=True, kw_only=True)
class ArmFlags:
    """Who competes."""

    speculate: Annotated[
        list[str],
        list_flag("--speculate", help="The arms: off, auto, NAME[:key=value,...]; + joins drafters"),
    ] = field(default_factory=list)
    against: Annotated[
        list[str],
        list_flag("--against", help="Also measure this OpenAI-compatible server: [NAME=]URL; repeatable"),
    ] = field(default_factory=list)

    def specs(self) -> list[str]:
        """The arms of our own; a typo shows here, before gigabytes are read."""
        from paceline.tools.bench import parse_speculation

        specs = [spec for text in self.speculate or ["off,auto"] for spec in split_specs(text)]
        if not specs and not self.against:
            raise UsageError("--speculate names no arm", "give off, auto, or a drafter's name")
        for spec in specs:
            parse_speculation(spec)
        return specs


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


@verb
def command(
    model: Model = DEMO_MODEL,
    *,
    chosen: PromptFlags,
    arms: ArmFlags,
    output: OutputFlags,
    sampling: SamplingFlags,
    machine: MachineFlags,
) -> int:
    from paceline.tools.bench import Arm, EngineArm, run
    from paceline.tools.peer import ServerArm

    output.check()
    params = sampling.params(max_tokens=128 if sampling.max_tokens is None else sampling.max_tokens)
    prompts, specs = chosen.load(), arms.specs()
    servers = [ServerArm(url, name) for name, url in map(_named, arms.against)]
    llm, path, load_s = load(model, machine, "off")
    chat = llm.chat_template is not None if chosen.chat is None else chosen.chat
    everyone: list[Arm] = [*(EngineArm(llm, spec, warm=chosen.warm) for spec in specs), *servers]
    with count_progress("Measuring", len(prompts) * len(everyone) * chosen.repeat) as step:
        report = run(everyone, prompts, params, chat=chat, repeat=chosen.repeat, progress=step)
    settings = asdict(chosen) | asdict(machine) | {"prompts": chosen.prompts.name, "chat": chat}
    _publish(
        report,
        output,
        {
            "provenance": provenance(),
            "model": describe_file(path) | {"load_s": load_s},
            "settings": settings | {"sampling": asdict(params)},
        },
    )
    return 1 if report.differences or not report.overall.figures else 0


def _publish(report: Report, output: OutputFlags, about: dict[str, Any]) -> None:
    from paceline.cli.bench_table import notes, table

    if output.json is None or str(output.json) != "-":
        stdout().print(table(report))
    notes(report)
    if output.json is not None:
        _write(output.json, json.dumps(report.as_json() | about, ensure_ascii=False, indent=1) + "\n")
    if output.html is not None:
        from paceline.tools.report import page

        _write(output.html, page(report, about))


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else ("", text)


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        terminal.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error}", "choose another place") from None
    terminal.note(f"wrote {path}")
