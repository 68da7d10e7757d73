"""Purses: what a costly drafter may lose, alone and in all."""

from __future__ import annotations

from paceline.planning.venture import Purse, Venture


def test_a_request_loses_no_more_than_its_start() -> None:
    venture = Venture()
    assert venture.may_ask(1)
    venture.settle(1, -3.1)
    assert not venture.may_ask(1)
    assert venture.may_ask(2)


def test_all_requests_together_lose_no_more_than_theirs() -> None:
    venture = Venture()
    for request in range(2):
        assert venture.may_ask(request)
        venture.settle(request, -3.1)
    assert not venture.may_ask(5)  # a new one, with a purse of its own


def test_losers_get_another_chance() -> None:
    venture = Venture()
    venture.may_ask(1)
    venture.settle(1, -3.1)
    steps = 0
    while not venture.may_ask(1):
        steps += 1
    assert 25 <= steps <= 40  # a tenth of a token, at 0.003 a step


def test_winnings_are_kept_up_to_a_limit() -> None:
    purse = Purse(1.0, 3.0)
    purse.add(10.0)
    assert purse.balance == 3.0
    purse.add(-4.0)
    assert purse.balance == -1.0


def test_probes_are_saved_up_slowly_and_not_without_end() -> None:
    venture = Venture()
    for _ in range(100):
        venture.may_ask(1)
    assert abs(venture.probes - 0.4) < 1e-9
    for _ in range(2000):
        venture.may_ask(1)
    assert venture.probes == Venture.MOST_PROBES


def test_a_request_that_is_over_leaves_nothing_behind() -> None:
    venture = Venture()
    venture.may_ask(1)
    venture.settle(1, -9.0)
    venture.forget(1)
    venture.settle(1, -1.0)  # late news of it count for all only
    venture.settle(2, 20.0)
    assert venture.may_ask(1)


def test_one_that_declines_is_asked_ever_more_seldom_until_it_has_something() -> None:
    venture = Venture()
    asked = []
    for step in range(80):
        if venture.may_ask(1):
            asked.append(step)
            venture.answered(1, drafted=False)
    assert asked == [0, 2, 5, 10, 19, 36, 53, 70]
    assert venture.may_ask(2)  # others have nothing to do with it
    venture.answered(1, drafted=True)
    assert venture.may_ask(1)
    venture.answered(1, drafted=False)
    assert [venture.may_ask(1) for _ in range(2)] == [False, True]
