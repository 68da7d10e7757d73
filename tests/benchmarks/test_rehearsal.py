"""What rehearsed heads say, and the passes that it leaves."""

from __future__ import annotations

from harness.rehearsal import Script

TEXT = list(range(100, 140))


def test_choices_are_right_at_exactly_the_shares_asked_for() -> None:
    script = Script(TEXT, 20, [0.5, 0.25], seed=3)
    written = script.ranks[20:]
    assert script.ranks[:20] == [-1] * 20
    assert (written.count(0), written.count(1), written.count(-1)) == (10, 5, 5)
    assert script.claims == [0.5, 0.5]  # half of those that the first leaves
    assert Script(TEXT, 20, [0.05], seed=3, claims=[0.9]).claims == [0.9]


def test_first_choices_stay_where_others_are_added() -> None:
    alone, beside = Script(TEXT, 20, [0.5], seed=1), Script(TEXT, 20, [0.5, 0.2], seed=1)
    assert [rank == 0 for rank in alone.ranks] == [rank == 0 for rank in beside.ranks]


def test_passes_are_counted_behind_the_token_that_the_prompt_yields() -> None:
    script = Script([0, 1, 2, 3, 4, 5, 6, 7], 2, [0.5], seed=0)
    script.ranks = [-1, -1, 0, 0, 0, -1, 0, 0]
    assert script.passes(0) == 5
    assert script.passes(1) == 3  # 3 and 4 | 5 | 6 and 7
    assert script.passes(2) == 2  # 3, 4 and 5 | 6 and 7
    assert script.passes(8) == 2
    script.leave_out({0, 1, 2, 3, 4, 5, 7})
    assert script.ranks[6] == -1
    assert script.passes(8) == 3  # 3, 4 and 5 | 6 | 7
