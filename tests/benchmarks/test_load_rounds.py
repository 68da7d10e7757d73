"""From runs under load to the ratios that are claimed, and what counts as equal."""

from __future__ import annotations

from dataclasses import replace

from harness.load_rounds import Ratio, Run, equality, judge

from paceline.tools.load_figures import Reply, figures


def run(turn: int, clients: int, engine: str, tokens: int, **more: object) -> Run:
    """One answer of so many tokens in one second."""
    reply = Reply(
        prompt="p",
        category="all",
        due_s=0.0,
        end_s=1.0,
        completion_tokens=tokens,
        text="t",
        finish_reason="stop",
    )
    replies = [replace(reply, **more)]  # type: ignore[arg-type]
    return Run(turn, clients, engine, figures(replies), 0, replies)


def test_ratios_are_taken_round_by_round_against_the_peers_best() -> None:
    speeds = {
        "paceline off": [10, 20, 30],
        "paceline auto": [20, 30, 60],
        "llama plain": [10, 12, 10],
        "llama mod-8": [5, 20, 15],  # median 15: the best, though plain was better once
    }
    runs = [run(turn, 4, name, some[turn]) for turn in range(3) for name, some in speeds.items()]
    runs.append(run(0, 1, "paceline auto", 7))
    four, one = judge(runs, ours="paceline auto", off="paceline off", peer="llama")
    assert (four.clients, four.requests, four.best) == (4, 1, "llama mod-8")
    assert four.speeds == {"paceline off": 20, "paceline auto": 30, "llama plain": 10, "llama mod-8": 15}
    assert four.over_best == Ratio(4.0, 1.5, 4.0)
    assert four.over_off == Ratio(2.0, 1.5, 2.0)
    assert str(four.over_best) == "4.00 (1.50 to 4.00)"
    assert (one.clients, one.best, one.over_best, one.over_off) == (1, "", None, None)


def test_a_peer_that_answered_nothing_has_no_ratio() -> None:
    runs = [run(0, 1, "paceline auto", 7), run(0, 1, "llama plain", 5, error="timed out")]
    (level,) = judge(runs, ours="paceline auto", off="paceline off", peer="llama")
    assert (level.best, level.over_best) == ("llama plain", None)


def test_every_answer_of_ours_is_compared_with_the_first() -> None:
    ours = ("off", "auto")
    same = [run(0, 1, "off", 3), run(0, 4, "auto", 3), run(1, 1, "llama", 4, text="x")]
    found = equality(same, ours)
    assert (found.prompts, found.texts, found.differences) == (1, 2, [])
    for more in ({"text": "u"}, {"finish_reason": "length"}, {"completion_tokens": 4}):
        found = equality([*same, run(1, 16, "auto", 3, **more)], ours)
        assert found.differences == ["p: auto, 16 clients, round 1"]
    assert equality([*same, run(1, 1, "auto", 0, text="", error="broken off")], ours).texts == 2
