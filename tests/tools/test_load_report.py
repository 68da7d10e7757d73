"""The page of a load test: complete, self-contained, safe to open."""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.tools.load import Cell, LoadReport
from paceline.tools.load_figures import Reply, figures
from paceline.tools.load_report import page


def report(*, text: str = "", error: str = "") -> LoadReport:
    reply = Reply(
        prompt="p",
        category="all",
        due_s=0.0,
        end_s=2.0,
        pieces_s=(0.5, 1.0, 2.0),
        completion_tokens=5,
        text=text,
    )
    failed = replace(reply, error=error, message="<i>because</i>") if error else reply
    names = ["one", "<b>two</b>"]
    cells = [
        Cell(level, name, figures([reply, failed]), 1.0, [reply, failed])
        for level in ("1 client", "4 clients")
        for name in names
    ]
    return LoadReport(names, ["1 client", "4 clients"], 4, 2, cells)


def test_the_page_fetches_nothing_and_escapes_everything() -> None:
    text = page(report(error="HTTP 429"), {"model": {"name": "<script>x</script>"}})
    assert "<script" not in text
    assert "<b>two" not in text
    assert "<i>because" not in text
    assert "&lt;b&gt;two&lt;/b&gt;" in text
    assert "1 HTTP 429" in text
    outside = {u for u in re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", text) if u[0] != "#"}
    assert outside == set()


def test_the_figures_are_on_it() -> None:
    text = page(report(), {})
    assert "4 requests of 2 prompts to each server" in text
    # 10 tokens in 2 s; first token 0.5 s; two tokens per gap of 0.5 and 1 s; 2 s in all; nothing failed
    assert (
        "<td>1 client<td>one<td>2<td>5.0<td>1.00<td>1.00<td>2.0<td>500 / 500 / 500<td>250.0 / 500.0 / 500.0"
        "<td>750.0 / 1000.0 / 1000.0<td>2.00 / 2.00 / 2.00<td><td>"
    ) in text
    assert "Remarks" not in text
    for title in ("output tokens per second", "first token ms", "inter-token ms", "latency ms"):
        assert title in text


def test_texts_that_differ_stand_out() -> None:
    found = report()
    found.differing = {"one": ["p", "q"], "<b>two</b>": []}
    assert "<li class=bad>one answered 2 prompts in more than one way." in page(found, {})


def test_the_same_report_gives_the_same_page() -> None:
    assert page(report(), {}) == page(report(), {})


def test_a_level_where_all_failed_leaves_a_gap() -> None:
    found = report()
    broken = [replace(r, error="timed out") for r in found.cells[0].replies]
    found.cells[0] = Cell("1 client", "one", figures(broken), None, broken)
    assert "2 timed out" in page(found, {})
