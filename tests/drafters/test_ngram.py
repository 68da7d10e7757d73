"""Prompt lookup: exact drafts on hand-made texts, and the index against searching."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import Context
from paceline.drafters.ngram import NgramDrafter, NgramIndex
from paceline.errors import UsageError


def search(tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """The same question answered by looking everywhere."""
    end = len(tokens)
    for n in range(min(longest, end - 1), shortest - 1, -1):
        for position in range(end - 1, n - 1, -1):
            if tokens[position - n : position] == tokens[end - n :]:
                return n, position
    return 0, 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 3),
    st.integers(0, 6),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_finds_the_longest_match_and_its_last_occurrence(tokens, shortest, more, pieces):
    grown: list[int] = []
    index = NgramIndex(grown, shortest, shortest + more)
    step = 0
    while len(grown) < len(tokens):
        grown += tokens[len(grown) : len(grown) + pieces[step % len(pieces)]]
        step += 1
        index.follow()
        assert index.find() == search(grown, shortest, shortest + more)


def propose(tokens: list[int], budget: int = 4, **options: int) -> list[int]:
    drafter = NgramDrafter(**options)
    context = Context(1, tokens, len(tokens))
    drafter.commit(context, None)
    return drafter.propose(context, budget).tokens


def test_copies_what_followed():
    assert propose([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1]


def test_the_longer_match_wins_over_the_newer():
    assert propose([7, 1, 2, 3, 10, 8, 2, 3, 11, 7, 1, 2, 3], budget=1) == [10]


def test_the_newer_wins_among_equals():
    assert propose([1, 2, 10, 1, 2, 11, 1, 2], budget=1) == [11]


def test_the_draft_ends_where_the_text_ends():
    assert propose([1, 2, 3, 1, 2], budget=9) == [3, 1, 2]


def test_a_match_shorter_than_the_minimum_does_not_count():
    assert propose([1, 2, 3, 4, 1], shortest=2) == []
    assert propose([1, 2, 3, 4, 1], shortest=1) == [2, 3, 4, 1]


def test_a_longer_match_is_claimed_with_more_chance():
    drafter = NgramDrafter()
    context = Context(1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 12)
    drafter.commit(context, None)
    chances = drafter.propose(context, 6).chances
    assert chances == sorted(chances)
    assert chances[0] < chances[-1]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3), (1, 65)])
def test_refuses_lengths_that_mean_nothing(shortest, longest):
    with pytest.raises(UsageError, match=f"min={shortest}, max={longest}"):
        NgramDrafter(shortest=shortest, longest=longest)
