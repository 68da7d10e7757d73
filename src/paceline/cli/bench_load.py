"""`paceline bench --against URL --concurrency 1,4,8`: servers under load"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from paceline.cli import terminal
from paceline.cli.bench_flags import OutputFlags, PromptFlags
from paceline.cli.display import count_progress
from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.tools.load_figures import written
from paceline.tools.peer_client import TIMEOUT_S
from paceline.tools.provenance import provenance

if TYPE_CHECKING:
    from paceline.tools.load import Cell, Level, LoadReport

MOST_CLIENTS = 4096
_SINGLE = {"model": "MODEL", "speculate": "--speculate", "warm": "--warm"}
_SINGLE |= {"threads": "--threads", "max_model_len": "--max-model-len"}
_LOADED = {"burstiness": "--burstiness", "timeout": "--timeout"}

HEADINGS = (
    *("load", "server", "tokens/s", "of first", "requests/s"),
    *("first token ms", "inter-token ms", "latency s", "tokens/pass", "failed"),
)


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How servers are loaded; without the first two, prompts are asked one at a time."""

    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", "--max-concurrency", help="Servers under so many clients; 1,4,8"),
    ] = None
    request_rate: Annotated[
        str | None,
        typer.Option("--request-rate", help="Servers under so many new requests per second; 1,2,4"),
    ] = None
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="Of --request-rate: 1 is Poisson, less is burstier")
    ] = 1.0
    timeout: Annotated[
        float, typer.Option("--timeout", help="Under load: seconds until a request is given up")
    ] = TIMEOUT_S

    @property
    def asked(self) -> bool:
        return self.concurrency is not None or self.request_rate is not None

    def check(self, given: Sequence[str]) -> None:
        """Refuse flags, of those typed, that would do nothing."""
        if self.concurrency is not None and self.request_rate is not None:
            raise UsageError(
                "--concurrency and --request-rate are two kinds of load", "measure one, then the other"
            )
        if self.concurrency is not None and "burstiness" in given:
            raise UsageError("--burstiness needs --request-rate", "clients that never pause have no arrivals")
        for name, flag in (_SINGLE if self.asked else _LOADED).items():
            if name in given and self.asked:
                raise UsageError(
                    f"{flag} is for measuring a model in this process, not servers under load",
                    "start `paceline serve` as it should be, and name it with --against",
                )
            if name in given:
                raise UsageError(f"{flag} is for servers under load", "add --concurrency or --request-rate")

    def levels(self, seed: int) -> list[Level]:
        """Raises UsageError for what is no number, out of range, or there twice."""
        from paceline.tools.load import Arrivals, Clients

        if not self.burstiness > 0:  # also refuses nan
            raise UsageError(f"--burstiness is {self.burstiness}", "give a number above 0")
        if not 0 < self.timeout < math.inf:
            raise UsageError(f"--timeout is {self.timeout}", "give seconds above 0")
        if self.concurrency is not None:
            flag, text, most = "--concurrency", self.concurrency, float(MOST_CLIENTS)
        else:
            flag, text, most = "--request-rate", self.request_rate or "", math.inf
        numbers = [_number(flag, word, most, whole=self.concurrency is not None) for word in text.split(",")]
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"{flag} is {text!r}, with a level twice", "name each level once")
        if self.concurrency is not None:
            return [Clients(int(number)) for number in numbers]
        return [Arrivals(number, self.burstiness, seed) for number in numbers]


def under_load(
    flags: LoadFlags,
    named: Sequence[tuple[str, str]],
    chosen: PromptFlags,
    params: SamplingParams,
    output: OutputFlags,
) -> int:
    """Sweep the servers and publish; the exit code is 1 when any request failed."""
    from paceline.tools import load_report
    from paceline.tools.load import sweep
    from paceline.tools.peer_client import Server

    if not named:
        raise UsageError("there is no server to put under load", "name it: --against http://127.0.0.1:8000")
    levels = flags.levels(params.seed or 0)
    prompts = chosen.load() * chosen.repeat
    servers = [Server(url, name) for name, url in named]
    chat = chosen.chat is not False
    with count_progress("Measuring", len(prompts) * len(servers)) as step:
        report = sweep(servers, levels, prompts, params, chat=chat, timeout=flags.timeout, progress=step)
    settings = asdict(chosen) | asdict(flags) | {"prompts": chosen.prompts.name, "chat": chat}
    about = {
        "provenance": provenance(),
        "models": {server.name: server.model for server in servers},
        "settings": settings | {"sampling": asdict(params)},
    }
    output.publish(
        table(report),
        lambda: notes(report),
        report.as_json() | about,
        lambda: load_report.page(report, about),
    )
    return 1 if any(cell.figures.errors for cell in report.cells) else 0


def table(report: LoadReport) -> Table:
    """Every server at every level; three numbers in a cell are p50, p90 and p99."""
    result = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading in ("load", "server") else "right", no_wrap=True)
    for cell in report.cells:
        first = cell.server == report.servers[0]
        result.add_row(cell.level if first else "", cell.server, *_cells(cell, first=first))
    return result


def _cells(cell: Cell, *, first: bool) -> tuple[str, ...]:
    f = cell.figures
    return (
        f"{f.output_tokens_per_s:.1f}",
        "" if first or cell.ratio is None else f"{cell.ratio:.2f}x",
        f"{f.requests_per_s:.2f}",
        written(f.first_token_s, 1e3, 0),
        written(f.inter_token_s, 1e3, 1),
        written(f.latency_s, 1.0, 2),
        "" if f.acceptance is None else f"{f.acceptance.mean_acceptance_length:.2f}",
        ", ".join(f"{count} {kind}" for kind, count in f.errors.items()),
    )


def notes(report: LoadReport) -> None:
    terminal.note("first token, inter-token and latency: p50 / p90 / p99; tokens from the servers' usage")
    if report.asked > report.distinct:
        terminal.note(f"{report.asked} requests of {report.distinct} prompts: caches may have helped")
    for server, prompts in report.differing.items():
        if prompts:
            terminal.note(f"{server} answered {len(prompts)} prompts in more than one way, as {prompts[0]}")
    seen = set()
    for cell in report.cells:
        for reply in cell.replies:
            if reply.error and (cell.server, reply.error) not in seen:
                seen.add((cell.server, reply.error))
                terminal.note(f"failed: prompt {reply.prompt} on {cell.server}: {reply.message}")


def _number(flag: str, word: str, most: float, *, whole: bool) -> float:
    kind = "whole numbers" if whole else "numbers"
    try:
        value = float(int(word) if whole else float(word))
    except ValueError:
        raise UsageError(f"{flag} has {word!r}", f"give {kind} above 0, parted by commas") from None
    if not 0 < value <= most:
        raise UsageError(
            f"{flag} has {word}", f"give {kind} above 0" + (f", at most {most:.0f}" if whole else "")
        )
    return value
