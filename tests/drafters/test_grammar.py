"""The drafter that offers what a constraint forces."""

from __future__ import annotations

import pytest

from paceline.core import Context
from paceline.drafters.grammar import GrammarDrafter
from support.grammars import Listed


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 9])
def test_offers_the_forced_run_as_certain(budget: int) -> None:
    context = Context(1, [5, 6], 2, constraint=Listed([[7], [8], [9], [1, 2], [3]], 20))
    draft = GrammarDrafter().propose(context, budget)
    n = min(budget, 3)
    assert draft.tokens == [7, 8, 9][:n]
    assert draft.parents == [-1, 0, 1][:n]
    assert draft.chances == [1.0] * n
    assert draft.sources == ("grammar",) * n


def test_offers_nothing_where_there_is_a_choice_or_no_constraint() -> None:
    assert len(GrammarDrafter().propose(Context(1, [5], 1, constraint=Listed([[1, 2]], 20)), 9)) == 0
    assert len(GrammarDrafter().propose(Context(1, [5], 1, constraint=Listed([None], 20)), 9)) == 0
    assert len(GrammarDrafter().propose(Context(1, [5], 1), 9)) == 0


def test_never_moves_the_constraint() -> None:
    constraint = Listed([[7], [8]], 20)
    drafter, context = GrammarDrafter(), Context(1, [5], 1, constraint=constraint)
    drafter.propose(context, 9)
    drafter.commit(context, None)
    drafter.forget(context)
    assert constraint.at == 0
