"""Suffix decoding: exact trees on hand-made histories."""

from __future__ import annotations

import pytest

from paceline.core import ROOT, Context
from paceline.drafters.suffix import SuffixDrafter


def make(**options: object) -> SuffixDrafter:
    return SuffixDrafter(vocab_size=1000, identity="test", **options)  # type: ignore[arg-type]


def request(
    drafter: SuffixDrafter, tokens: list[int], number: int = 1, prompt_length: int | None = None
) -> Context:
    context = Context(number, tokens, len(tokens) if prompt_length is None else prompt_length)
    drafter.commit(context, None)
    return context


def edges(drafter: SuffixDrafter, context: Context, budget: int) -> dict[tuple[int, ...], float]:
    """Path of tokens from the root -> chance of its last node."""
    draft = drafter.propose(context, budget)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return dict(zip(paths, draft.chances, strict=True))


def test_copies_a_long_match_as_a_chain():
    text = list(range(100, 130))
    drafter = make()
    context = request(drafter, text + text[:10])
    draft = drafter.propose(context, 6)
    assert draft.tokens == text[10:16]
    assert draft.parents == [-1, 0, 1, 2, 3, 4]


def test_a_copied_chain_ends_where_the_text_ends():
    text = list(range(100, 120))
    drafter = make()
    # After the whole of it, it can only begin again.
    context = request(drafter, text + text[:18])
    assert drafter.propose(context, 15).tokens == [118, 119, *text[:13]]


def test_offers_both_continuations_the_commoner_first():
    # 5 6 was followed by 7 three times and by 8 once, never after the same token before 5.
    drafter = make()
    context = request(drafter, [1, 5, 6, 7, 2, 5, 6, 8, 3, 5, 6, 7, 4, 5, 6, 7, 9, 5, 6])
    found = edges(drafter, context, 8)
    assert found[(7,)] > found[(8,)] > 0
    assert found[(7,)] + found[(8,)] < 1


def test_the_longest_context_speaks_first_and_shorter_ones_share_the_rest():
    # After 1 2 came 3, the end of that response; after 2 alone, mostly 4.
    drafter = make()
    for number, response in enumerate([[5, 2, 4], [6, 2, 4], [7, 2, 4], [1, 2, 3]], 2):
        drafter.forget(request(drafter, [0, *response], number, prompt_length=1))
    found = edges(drafter, request(drafter, [9, 1, 2]), 9)
    assert list(found) == [(3,), (4,)]
    assert found[(3,)] > 2 * found[(4,)] > 0.05


def test_a_node_has_at_most_width_children():
    drafter = make()
    context = request(drafter, [x for follower in range(10, 20) for x in (1, 2, follower)] + [1, 2])
    root = [path for path in edges(drafter, context, 15) if len(path) == 1]
    assert 1 <= len(root) <= 3


def test_earlier_responses_are_drafted_from_and_prompts_are_not():
    drafter = make()
    context = request(drafter, [1, 2, 3, 4, 50, 51, 52, 53, 54], prompt_length=4)
    drafter.forget(context)
    again = request(drafter, [9, 50, 51], number=2)
    assert drafter.propose(again, 3).tokens[:3] == [52, 53, 54]
    prompt_only = request(drafter, [9, 1, 2], number=3)
    assert len(drafter.propose(prompt_only, 3)) == 0


def test_nothing_is_shared_when_told_so():
    drafter = make(max_tokens=0)
    drafter.forget(request(drafter, [1, 2, 50, 51, 52, 53], prompt_length=2))
    assert len(drafter.propose(request(drafter, [9, 50, 51], number=2), 3)) == 0


def test_agreement_of_both_histories_raises_the_chance():
    alone, both = make(), make()
    both.forget(request(both, [60, 50, 51, 52], prompt_length=1))
    own = [50, 51, 52, 7, 50, 51]
    alone_chance = edges(alone, request(alone, list(own), number=2), 1)[(52,)]
    both_chance = edges(both, request(both, list(own), number=2), 1)[(52,)]
    assert both_chance > alone_chance


def test_a_request_whose_guesses_fail_falls_silent_and_one_that_copies_wakes_up():
    """Without anything being bought: the text alone shows what would have been right."""
    drafter = make(max_tokens=0)
    # Every token occurred before, yet what follows is new each time: a permutation per line.
    shuffled = [(i * step) % 101 for step in range(1, 13) for i in range(1, 101)]
    context = Context(1, shuffled[:100], 1)
    drafter.commit(context, None)
    first = drafter.propose(context, 1).chances
    for token in shuffled[100:1100]:
        context.tokens.append(token)
        drafter.commit(context, None)
        last = drafter.propose(context, 1).chances
    assert max(last, default=0.0) < 0.1 < max(first, default=1.0)
    for token in shuffled[300:340]:
        context.tokens.append(token)
        drafter.commit(context, None)
        woken = drafter.propose(context, 4)
    assert woken.tokens == shuffled[340:344]
    assert min(woken.chances) > 0.5


@pytest.mark.parametrize("budget", [0, -1])
def test_no_budget_no_draft(budget):
    drafter = make()
    assert len(drafter.propose(request(drafter, [1, 2, 1, 2, 1]), budget)) == 0
