"""A load test as one HTML page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from paceline.tools.load import Cell, LoadReport
from paceline.tools.load_figures import LoadFigures, written
from paceline.tools.page import PALETTE, finish, number, plotting, svg
from paceline.tools.page import page as framed
from paceline.tools.statistics import Quantiles

_COLUMNS = (
    *("load", "server", "requests", "tokens/s", "of the first", "requests/s", "in flight"),
    *("first token ms", "inter-token ms", "gap ms", "latency s", "tokens per pass", "failed"),
)

_LEGEND = (
    "Three numbers in a cell are p50 / p90 / p99. Tokens come from the servers' usage. Inter-token latency "
    "is per token: a gap before a piece of text, shared by the tokens of a mean piece; gap is what one sees."
)

_PANELS: tuple[tuple[str, Callable[[LoadFigures], float | None]], ...] = (
    ("output tokens per second", lambda f: f.output_tokens_per_s),
    ("first token ms, p50 and p99", lambda f: _ms(f.first_token_s, "p50")),
    ("inter-token ms, p50 and p99", lambda f: _ms(f.inter_token_s, "p50")),
    ("latency ms, p50 and p99", lambda f: _ms(f.latency_s, "p50")),
)
_TAILS: tuple[Callable[[LoadFigures], float | None] | None, ...] = (
    None,
    lambda f: _ms(f.first_token_s, "p99"),
    lambda f: _ms(f.inter_token_s, "p99"),
    lambda f: _ms(f.latency_s, "p99"),
)


def page(report: LoadReport, about: dict[str, Any]) -> str:
    """Return the whole page. Raises UsageError when matplotlib is not installed."""
    with plotting():
        plot = _plot(report)
    asked = f"{report.asked} requests of {report.distinct} prompts to each server, dealt among the levels."
    body = f"<p>{asked} {_LEGEND}</p>\n{_table(report.cells)}\n<figure>{plot}</figure>\n{_remarks(report)}"
    return framed("Paceline load test", body, about)


def _table(cells: list[Cell]) -> str:
    head = "".join(f"<th>{name}" for name in _COLUMNS)
    rows = (f"<tr><td>{escape(c.level)}<td>{escape(c.server)}{_cells(c)}" for c in cells)
    return f"<table><tr>{head}\n{chr(10).join(rows)}</table>"


def _cells(cell: Cell) -> str:
    f = cell.figures
    values = (
        str(f.requests),
        number(f.output_tokens_per_s, 1),
        number(cell.ratio, 2),
        number(f.requests_per_s, 2),
        number(f.in_flight, 1),
        written(f.first_token_s, 1e3, 0),
        written(f.inter_token_s, 1e3, 1),
        written(f.gap_s, 1e3, 1),
        written(f.latency_s, 1.0, 2),
        number(f.acceptance.mean_acceptance_length if f.acceptance else None, 2),
        escape(", ".join(f"{count} {kind}" for kind, count in f.errors.items())),
    )
    return "".join(f"<td>{value}" for value in values)


def _ms(found: Quantiles | None, name: str) -> float | None:
    return None if found is None else float(getattr(found, name)) * 1e3


def _remarks(report: LoadReport) -> str:
    items = [
        f"{server} answered {len(prompts)} prompts in more than one way."
        for server, prompts in report.differing.items()
        if prompts
    ]
    failed = {
        (cell.level, cell.server, reply.error): reply
        for cell in report.cells
        for reply in reversed(cell.replies)
        if reply.error
    }
    items += [f"{level}, {server}: {reply.message}" for (level, server, _), reply in failed.items()]
    if not items:
        return ""
    return f"<h2>Remarks</h2><ul>{''.join(f'<li class=bad>{escape(item)}' for item in items)}</ul>\n"


def _plot(report: LoadReport) -> str:
    """Four panels over the levels, a line for each server; tails are dotted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (title, read), tail in zip(figure.subplots(2, 2).flat, _PANELS, _TAILS, strict=True):
        for i, server in enumerate(report.servers):
            own = [c.figures for c in report.cells if c.server == server]
            colour = PALETTE[i % len(PALETTE)]
            _line(axes, [read(f) for f in own], colour, "o-", label=server)
            if tail is not None:
                _line(axes, [tail(f) for f in own], colour, "o:", label="")
        axes.set_title(title, fontsize="medium")
        axes.set_xticks(range(len(report.levels)), report.levels)
        if tail is None:
            axes.set_ylim(bottom=0)
        else:  # the tail may be a hundred times the median
            _logarithmic(axes)
        finish(axes)
    return svg(figure, "load")


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _line(axes: Any, values: list[float | None], colour: str, style: str, *, label: str) -> None:
    shown = [float("nan") if value is None else value for value in values]
    axes.plot(range(len(shown)), shown, style, color=colour, label=label or "_")
