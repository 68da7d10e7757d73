"""A benchmark as one HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from paceline.tools.bench import Report
from paceline.tools.page import PALETTE, finish, number, plotting, svg
from paceline.tools.page import page as framed
from paceline.tools.statistics import Figures, SpeedUp, Summary

_COLUMNS = (
    *("category", "arm", "prompts", "tokens/s", "speed-up", "95 %", "tokens per pass"),
    *("accepted / drafted", "prefill tokens/s", "first token ms"),
)


def page(report: Report, about: dict[str, Any]) -> str:
    """Return the whole page. Raises UsageError when matplotlib is not installed."""
    with plotting():
        plots = "".join(f"<figure>{plot}</figure>" for plot in _plots(report))
    body = (
        f"<p>{_equality(report)}</p>\n<h2>Overall</h2>\n{_table({'overall': report.overall})}\n{plots}\n"
        f"<h2>By category</h2>\n{_table(report.categories)}\n{_failures(report)}"
    )
    return framed("Paceline benchmark", body, about)


def _plots(report: Report) -> list[str]:
    claims = any(f.acceptance and f.acceptance.reliability for f in report.overall.figures.values())
    return [_speeds(report), _acceptance(report), *([_reliability(report)] if claims else [])]


def _equality(report: Report) -> str:
    if report.differences:
        return (
            f"<span class=bad>{len(report.differences)} outputs differ from {escape(report.arms[0])}.</span>"
        )
    clocks = "; ".join(f"{escape(arm)}: {escape(clock)}" for arm, clock in report.decode_clocks.items())
    return f"Paceline's arms wrote identical tokens for every prompt. Decode time by {clocks}."


def _table(sections: dict[str, Summary]) -> str:
    head = "".join(f"<th>{name}" for name in _COLUMNS)
    rows = (
        f"<tr><td>{escape(category)}<td>{escape(arm)}{_cells(figures, summary.speed_ups[arm])}"
        for category, summary in sections.items()
        for arm, figures in summary.figures.items()
    )
    return f"<table><tr>{head}\n{chr(10).join(rows)}</table>"


def _cells(f: Figures, up: SpeedUp | None) -> str:
    a, ttft = f.acceptance, f.time_to_first_token_s
    values = (
        str(f.prompts),
        number(f.decode_tokens_per_s, 1),
        number(up.ratio if up else None, 2),
        f"{up.low:.2f} to {up.high:.2f}" if up and up.low is not None and up.high is not None else "",
        number(a.mean_acceptance_length if a else None, 2),
        f"{a.accepted} / {a.drafted}" if a else "",
        number(f.prefill_tokens_per_s, 0),
        number(ttft.p50 * 1e3 if ttft else None, 0),
    )
    return "".join(f"<td>{value}" for value in values)


def _failures(report: Report) -> str:
    if not report.failures:
        return ""
    items = "".join(
        f"<li>{escape(f.prompt)} on {escape(f.arm)}: {escape(f.message)}" for f in report.failures
    )
    return f"<h2>Failed, and left out for every arm</h2><ul>{items}</ul>\n"


def _speeds(report: Report) -> str:
    """Bars of decode speed, arms beside each other in every category."""
    from matplotlib.figure import Figure

    sections = {**report.categories, "overall": report.overall}
    figure = Figure(figsize=(9, 0.9 + 0.22 * (len(report.arms) + 1) * len(sections)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(report.arms)
    for i, arm in enumerate(report.arms):
        shown = [s.figures.get(arm) for s in sections.values()]
        speeds = [(f.decode_tokens_per_s or 0.0) if f else 0.0 for f in shown]
        places = [place + i * height for place in range(len(sections))]
        axes.barh(places, speeds, height, label=arm, color=PALETTE[i % len(PALETTE)])
    axes.set_yticks([p + 0.4 - height / 2 for p in range(len(sections))], list(sections))
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second while decoding")
    finish(axes)
    return svg(figure, "speeds")


def _acceptance(report: Report) -> str:
    """How far into a draft the target still agrees."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    for i, arm in enumerate(report.arms):
        figures = report.overall.figures.get(arm)
        if figures and figures.acceptance and figures.acceptance.per_position:
            shares = figures.acceptance.per_position
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=arm, color=PALETTE[i % len(PALETTE)])
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted up to here")
    axes.set_ylim(0, 1)
    finish(axes)
    return svg(figure, "acceptance")


def _reliability(report: Report) -> str:
    """Chances that drafters gave against the share that came true; larger dots stand for more tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], ":", color=PALETTE[0])
    lines = [
        (f"{name} ({arm})", classes)
        for arm, figures in report.overall.figures.items()
        if figures.acceptance
        for name, classes in figures.acceptance.reliability.items()
        if classes
    ]
    for i, (label, classes) in enumerate(lines):
        places = [c.predicted for c in classes], [c.accepted for c in classes]
        colour = PALETTE[(i + 1) % len(PALETTE)]
        axes.plot(*places, "-", color=colour, label=label)
        axes.scatter(*places, [6 + 4 * c.decided**0.5 for c in classes], color=colour)
    axes.set_xlabel("chance that the drafter gave")
    axes.set_ylabel("share that the target accepted")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    finish(axes)
    return svg(figure, "reliability")
