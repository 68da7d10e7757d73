"""Prices decide how far a draft model goes: exact cases."""

from __future__ import annotations

import pytest

from paceline.core import Prices
from paceline.drafters.outlook import Hope, Outlook


def prices(row: float = 0.0, nodes: int = 20, tokens: float = 1.0) -> Prices:
    return Prices(plain=1.0, tokens=tokens, extra=[row * n for n in range(nodes + 1)])


def outlook(cost: float, **more: float) -> Outlook:
    return Outlook(prices(**more), lambda rows: cost)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chance", "cost", "opens"),
    [
        (0.5, 0.49, True),  # one token: 1.5 in 1.49 seconds
        (0.5, 0.48, True),
        (0.5, 0.50, False),  # one token gains nothing, and no longer draft does
        (0.9, 0.95, False),
        (0.9, 0.85, True),
        (0.0, 0.01, False),
    ],
)
def test_begins_only_what_promises_to_pay(chance: float, cost: float, opens: bool) -> None:
    if (chance, cost) == (0.5, 0.49):
        opens = False  # 1.5 / 1.49 is below the margin
    assert outlook(cost).open([Hope(chance, 8, 1, 100.0)]) == ([0] if opens else [])


def test_a_first_pass_that_pays_only_for_long_drafts_is_made() -> None:
    """It costs 0.9; one token would not pay for it, eight do."""
    seconds = {2: 0.9, 1: 0.02}
    view = Outlook(prices(), lambda rows: seconds[rows])
    assert view.open([Hope(0.95, 1, 2, 100.0)]) == [0]  # 1.95 in 1.9
    assert view.open([Hope(0.85, 1, 2, 100.0)]) == []
    assert view.open([Hope(0.85, 8, 2, 100.0)]) == [0]


def test_a_long_text_is_read_if_enough_steps_profit() -> None:
    view = Outlook(prices(), lambda rows: 0.01 * rows)
    assert view.open([Hope(0.8, 8, 1008, 100.0)]) == [0]  # 10 seconds over 100 steps
    assert view.open([Hope(0.8, 8, 1008, 2.0)]) == []


def test_requests_that_would_spoil_the_step_are_left_out() -> None:
    view = Outlook(prices(tokens=3.0, row=0.05), lambda rows: 0.2 + 0.1 * rows)
    assert view.open([Hope(0.02, 8, 1, 9.0), Hope(0.9, 8, 1, 9.0), Hope(0.9, 8, 1, 9.0)]) == [1, 2]


def test_goes_on_while_the_rate_rises() -> None:
    view = outlook(0.25)
    view.spent, gains = 0.25, [0.8, 0.64, 0.5, 0.4, 0.3]
    view.add(0.8)
    # 1.8 tokens in 1.25 seconds so far: a pass of 0.25 must bring more than 0.36.
    assert [view.onward([gain]) for gain in gains] == [[0], [0], [0], [0], []]


def test_those_that_gain_most_go_on() -> None:
    view = Outlook(prices(tokens=3.0, row=0.1), lambda rows: 0.05 * rows)
    view.spent = 0.2
    assert view.onward([0.1, 0.9, 0.5]) == [1, 2]  # 0.15 seconds each; the rate is 2.5 a second
    assert view.onward([]) == []


def test_there_are_no_more_nodes_than_prices() -> None:
    view = outlook(0.0, nodes=2)
    view.add(1.0)
    view.add(1.0)
    assert view.onward([1.0]) == []
    assert not view.worthwhile(1.0)


def test_a_row_must_be_worth_itself() -> None:
    view = outlook(0.0, row=0.1)
    assert view.worthwhile(0.11)
    assert not view.worthwhile(0.09)


def test_reading_a_text_first_must_promise_more() -> None:
    view = outlook(0.4)
    assert view.open([Hope(0.5, 1, 8, 100.0)]) == [0]  # 1.5 in 1.4, already on the way
    assert view.open([Hope(0.5, 1, 9, 100.0)]) == []
    assert view.open([Hope(0.6, 1, 9, 100.0)]) == [0]
