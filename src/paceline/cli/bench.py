"""`paceline bench MODEL --prompts FILE.jsonl`; with `--concurrency` or `--request-rate` servers under load"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from paceline.cli.bench_flags import OutputFlags, PromptFlags
from paceline.cli.bench_load import LoadFlags, under_load
from paceline.cli.display import count_progress
from paceline.cli.loading import load
from paceline.cli.options import DEMO_MODEL, MachineFlags, Model, SamplingFlags, list_flag, split_specs
from paceline.cli.verb import verb
from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.tools.provenance import describe_file, provenance


@dataclass(frozen=True, kw_only=True)
class ArmFlags:
    """Who competes."""

    speculate: Annotated[
        list[str],
        list_flag("--speculate", help="The arms: off, auto, NAME[:key=value,...]; + joins drafters"),
    ] = field(default_factory=list)
    against: Annotated[
        list[str],
        list_flag(
            "--against",
            help="Also measure this OpenAI-compatible server: [NAME=]URL; repeatable, or a comma list",
        ),
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

    def servers(self) -> list[tuple[str, str]]:
        """Name, or "", and URL of each server."""
        apart = (one for text in self.against for one in re.split(r",(?=[^,/=]*=?https?://)", text))
        return [_named(one.strip()) for one in apart]


@verb
def command(
    context: typer.Context,
    model: Model = DEMO_MODEL,
    *,
    chosen: PromptFlags,
    arms: ArmFlags,
    load_flags: LoadFlags,
    output: OutputFlags,
    sampling: SamplingFlags,
    machine: MachineFlags,
) -> int:
    output.check()
    params = sampling.params(max_tokens=128 if sampling.max_tokens is None else sampling.max_tokens)
    load_flags.check(given=[name for name in context.params if _typed(context, name)])
    if load_flags.asked:
        return under_load(load_flags, arms.servers(), chosen, params, output)
    return _compare(model, chosen, arms, params, output, machine)


def _compare(
    model: str,
    chosen: PromptFlags,
    arms: ArmFlags,
    params: SamplingParams,
    output: OutputFlags,
    machine: MachineFlags,
) -> int:
    """Measure one prompt at a time: our own arms, and servers beside them."""
    from paceline.cli import bench_table
    from paceline.tools import report as pages
    from paceline.tools.bench import Arm, EngineArm, run
    from paceline.tools.peer import ServerArm

    prompts, specs = chosen.load(), arms.specs()
    servers = [ServerArm(url, name) for name, url in arms.servers()]
    llm, path, load_s = load(model, machine, "off")
    chat = llm.chat_template is not None if chosen.chat is None else chosen.chat
    everyone: list[Arm] = [*(EngineArm(llm, spec, warm=chosen.warm) for spec in specs), *servers]
    with count_progress("Measuring", len(prompts) * len(everyone) * chosen.repeat) as step:
        report = run(everyone, prompts, params, chat=chat, repeat=chosen.repeat, progress=step)
    settings = asdict(chosen) | asdict(machine) | {"prompts": chosen.prompts.name, "chat": chat}
    about = {
        "provenance": provenance(),
        "model": describe_file(path) | {"load_s": load_s},
        "settings": settings | {"sampling": asdict(params)},
    }
    output.publish(
        bench_table.table(report),
        lambda: bench_table.notes(report),
        report.as_json() | about,
        lambda: pages.page(report, about),
    )
    return 1 if report.differences or not report.overall.figures else 0


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else ("", text)
