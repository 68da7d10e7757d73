"""A benchmark as a table on stdout, and what there is to say about it on stderr."""

from __future__ import annotations

from rich.table import Table

from paceline.cli import terminal
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


def table(report: Report) -> Table:
    """Every arm in every category, and overall."""
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


def notes(report: Report) -> None:
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
