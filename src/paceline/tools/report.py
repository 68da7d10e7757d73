"""A benchmark as one HTML page: tables and SVG plots, no scripts, nothing fetched, light and dark."""

from __future__ import annotations

import io
import json
import re
from html import escape
from typing import Any

from paceline.errors import UsageError
from paceline.tools.bench import Report
from paceline.tools.statistics import Figures, SpeedUp, Summary

_INK = "#010203"
"""Stands for the text colour in plots; the page replaces it by `currentColor`."""

_PALETTE = ("#8a94a6", "#2f8f6b", "#c9772b", "#5b7fd1", "#b0568f", "#9b8a2f")

_COLUMNS = (
    *("category", "arm", "prompts", "tokens/s", "speed-up", "95 %", "tokens per pass"),
    *("accepted / drafted", "prefill tokens/s", "first token ms"),
)

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
svg { width: 100%; height: auto; }
pre { background: var(--soft); padding: .8rem; overflow: auto; font-size: 12px; }
.bad { color: #d33; font-weight: bold; }
"""


def page(report: Report, about: dict[str, Any]) -> str:
    """Return the whole page. Raises UsageError when matplotlib is not installed."""
    plots = "".join(f"<figure>{plot}</figure>" for plot in _plots(report))
    details = json.dumps(about, indent=1, ensure_ascii=False)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>Paceline benchmark</title><style>{_STYLE}</style>\n<h1>Paceline benchmark</h1>\n"
        f"<p>{_equality(report)}</p>\n<h2>Overall</h2>\n{_table({'overall': report.overall})}\n{plots}\n"
        f"<h2>By category</h2>\n{_table(report.categories)}\n{_failures(report)}"
        f"<h2>Where this comes from</h2>\n<pre>{escape(details)}</pre>\n</html>\n"
    )


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
        _number(f.decode_tokens_per_s, 1),
        _number(up.ratio if up else None, 2),
        f"{up.low:.2f} to {up.high:.2f}" if up and up.low is not None and up.high is not None else "",
        _number(a.mean_acceptance_length if a else None, 2),
        f"{a.accepted} / {a.drafted}" if a else "",
        _number(f.prefill_tokens_per_s, 0),
        _number(ttft.p50 * 1e3 if ttft else None, 0),
    )
    return "".join(f"<td>{value}" for value in values)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _failures(report: Report) -> str:
    if not report.failures:
        return ""
    items = "".join(
        f"<li>{escape(f.prompt)} on {escape(f.arm)}: {escape(f.message)}" for f in report.failures
    )
    return f"<h2>Failed, and left out for every arm</h2><ul>{items}</ul>\n"


def _plots(report: Report) -> list[str]:
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError(
            "--html needs matplotlib", "run `pip install 'paceline[bench]'`, or use --json"
        ) from None
    mpl.use("svg")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.family": "sans-serif"}
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with mpl.rc_context(settings | dict.fromkeys(inks, _INK)):
        return [_speeds(report), _acceptance(report)]


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
        axes.barh(places, speeds, height, label=arm, color=_PALETTE[i % len(_PALETTE)])
    axes.set_yticks([p + 0.4 - height / 2 for p in range(len(sections))], list(sections))
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second while decoding")
    _finish(axes)
    return _svg(figure, "speeds")


def _acceptance(report: Report) -> str:
    """How far into a draft the target still agrees."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    for i, arm in enumerate(report.arms):
        figures = report.overall.figures.get(arm)
        if figures and figures.acceptance and figures.acceptance.per_position:
            shares = figures.acceptance.per_position
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=arm, color=_PALETTE[i % len(_PALETTE)])
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted up to here")
    axes.set_ylim(0, 1)
    _finish(axes)
    return _svg(figure, "acceptance")


def _finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _svg(figure: Any, name: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # Ids repeat between plots of one page.
    return re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", text)
