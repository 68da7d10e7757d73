"""The frame of HTML reports: one page, tables and SVG plots, no scripts, nothing fetched, light and dark."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from paceline.errors import UsageError

PALETTE = ("#8a94a6", "#2f8f6b", "#c9772b", "#5b7fd1", "#b0568f", "#9b8a2f")

_INK = "#010203"
"""Stands for the text colour in plots; the page replaces it by `currentColor`."""

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
table { font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
svg { width: 100%; height: auto; }
pre { background: var(--soft); padding: .8rem; overflow: auto; font-size: 12px; }
.bad { color: #d33; font-weight: bold; }
"""


def page(title: str, body: str, about: dict[str, Any]) -> str:
    """Return a whole page: the body's HTML, and where the numbers come from."""
    details = json.dumps(about, indent=1, ensure_ascii=False)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}"
        f"<h2>Where this comes from</h2>\n<pre>{escape(details)}</pre>\n</html>\n"
    )


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@contextmanager
def plotting() -> Iterator[None]:
    """Draw within this. Raises UsageError when matplotlib is not installed."""
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
        yield


def finish(axes: Any) -> None:
    """Take away the box, and name the lines."""
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, loc="upper left")  # the best place takes long to find


def svg(figure: Any, name: str) -> str:
    """A figure as SVG to put into a page; `name` keeps the ids of a page's plots apart."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", text)
