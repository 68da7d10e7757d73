"""Following a predicted text: exact drafts before, at and after the places where the output leaves it."""

from __future__ import annotations

from paceline.core import ROOT, Context, Draft
from paceline.drafters.prediction import PredictionDrafter

PREDICTION = list(range(100, 140))


def after(written: list[int], prediction: list[int] = PREDICTION, budget: int = 4) -> Draft:
    drafter = PredictionDrafter(vocab_size=1000)
    context = Context(1, [1, 2, 3], 3, prediction)
    drafter.commit(context, None)
    for token in written:
        context.tokens.append(token)
        drafter.commit(context, None)
    return drafter.propose(context, budget)


def chains(draft: Draft) -> list[list[int]]:
    """The chains from the root, in order."""
    found: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        if parent == ROOT:
            found.append([])
        found[-1].append(token)
    return found


def test_begins_at_the_beginning():
    assert chains(after([])) == [[100, 101, 102, 103]]


def test_goes_along():
    assert chains(after([100, 101, 102])) == [[103, 104, 105, 106]]


def test_the_longer_it_agreed_the_surer_it_is():
    assert after(PREDICTION[:20]).chances[0] > after(PREDICTION[:2]).chances[0] > after([]).chances[0]


def test_after_one_strange_token_it_guesses_insertion_and_replacement():
    assert chains(after([100, 101, 7])) == [[102, 103], [103, 104]]


def test_after_three_strange_tokens_replacement_is_three_on():
    assert chains(after([100, 101, 7, 8, 9])) == [[102, 103], [105, 106]]


def test_meets_again_after_an_insertion():
    assert chains(after([100, 101, 7, 8, 102])) == [[103, 104, 105, 106]]


def test_meets_again_after_a_deletion():
    assert chains(after([100, 101, 110])) == [[111, 112, 113, 114]]


def test_a_far_single_token_is_chance_but_two_are_a_place():
    assert chains(after([100, 101, 130]))[0][0] == 102
    assert chains(after([100, 101, 130, 131])) == [[132, 133, 134, 135]]


def test_a_place_behind_is_found_too():
    assert chains(after([*PREDICTION[:20], 105, 106, 107])) == [[108, 109, 110, 111]]


def test_the_nearest_place_ahead_wins_among_equals():
    prediction = [1, 50, 2, 50, 3, 50, 4]
    assert chains(after([1, 50, 2, 9, 50], prediction)) == [[3, 50, 4]]


def test_offers_nothing_past_the_end():
    assert len(after(PREDICTION)) == 0


def test_is_cut_at_the_first_id_outside_the_vocabulary():
    drafter = PredictionDrafter(vocab_size=103)
    context = Context(1, [1], 1, [100, 101, 102, 103, 5])
    assert drafter.propose(context, 9).tokens == [100, 101, 102]
    for request, bad in enumerate(([-1, 5], [103, 5]), 2):
        assert len(drafter.propose(Context(request, [1], 1, bad), 9)) == 0
