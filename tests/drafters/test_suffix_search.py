"""The native search against one in Python, and that one's tree of contexts against plain counting."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import native
from paceline.core import ROOT
from support.context_tree import DEPTH, SEPARATOR, TOP, ContextTree, Node
from support.suffix_search import COUNTED, LEFT_OVER, search


def followers(tokens: list[int], context: list[int]) -> list[int]:
    """Positions whose token was preceded by `context`, with no separator in between or at it."""
    n = len(context)
    return [
        i for i in range(n, len(tokens)) if tokens[i - n : i] == context and tokens[i] != SEPARATOR
    ]  # fmt: skip


def check_contexts(tree: ContextTree, text: list[int]) -> None:
    """Everything the tree says about the end of `text` equals what counting says."""
    nodes, leaf = tree.contexts(text)
    for length, node in enumerate(nodes, 1):
        counts = Counter(tree.tokens[i] for i in followers(tree.tokens, text[-length:]))
        assert node.counts == counts
        assert node.total == counts.total()
        assert [counts[t] for t in node.top] == sorted(counts.values(), reverse=True)[:TOP]
    length = len(nodes) + 1
    places = followers(tree.tokens, text[-length:]) if length <= min(len(text), DEPTH) else []
    if leaf < 0:
        assert not places
        return
    assert leaf == places[-1]
    assert len({tree.tokens[i] for i in places}) == 1
    chain = [leaf]
    while (older := tree.older[chain[-1]]) >= 0:
        chain.append(older)
    assert chain == places[::-1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-1, 2), max_size=55),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
)
def test_counts_equal_plain_counting(tokens, text):
    tree = ContextTree(tokens)
    tree.follow()
    check_contexts(tree, text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=60), st.integers(1, 7))
def test_growing_in_pieces_is_growing_at_once(tokens, piece):
    grown: list[int] = []
    tree = ContextTree(grown)
    for start in range(0, len(tokens), piece):
        grown += tokens[start : start + piece]
        tree.follow()
        check_contexts(tree, grown)


def test_a_context_with_one_follower_stays_a_leaf():
    tree = ContextTree([1, 2, 3, 1, 2, 3, 1, 2])
    tree.follow()
    nodes, leaf = tree.contexts([1, 2])
    assert nodes == []
    assert (leaf, tree.older[leaf], tree.tokens[leaf]) == (5, 2, 3)


def test_a_second_follower_makes_a_node_and_hands_the_positions_down():
    tree = ContextTree([9, 2, 3, 8, 2, 4, 7, 2, 3])
    tree.follow()
    nodes, leaf = tree.contexts([0, 2])
    assert leaf == -1
    assert [node.counts for node in nodes] == [{3: 2, 4: 1}]
    nodes, leaf = tree.contexts([8, 2])
    assert (len(nodes), leaf) == (1, 5)
    nodes, leaf = tree.contexts([7, 2])
    assert (len(nodes), leaf) == (1, 8)


def test_no_context_reaches_across_a_separator():
    tree = ContextTree([1, 2, SEPARATOR, 3, 4])
    tree.follow()
    assert tree.contexts([2]) == ([], -1)
    assert tree.contexts([3])[1] == 4


def test_long_runs_stay_cheap_and_right():
    """A run of one token, broken once: the leaf of thousands of positions splits in bounded time."""
    tokens = [5] * 20_000 + [6]
    tree = ContextTree(tokens)
    tree.follow()
    nodes, _ = tree.contexts([5] * 40)
    assert len(nodes) == DEPTH
    assert nodes[0].counts == {5: 19_999, 6: 1}
    assert nodes[0].top == [5, 6]


@given(st.lists(st.integers(0, 9), max_size=80))
def test_top_holds_the_most_frequent_newest_first_among_equals(tokens):
    node = Node()
    for token in tokens:
        node.count(token)
    counts = Counter(tokens)
    assert [counts[t] for t in node.top] == sorted(counts.values(), reverse=True)[:TOP]
    if tokens:
        best = max(counts.values())
        newest = [t for t in tokens if counts[t] == best]
        assert node.top[0] in newest


def test_matched_counts_backwards_up_to_the_limit():
    tree = ContextTree([1, 2, 3, 4, 9, 2, 3, 4])
    tree.follow()
    assert tree.matched([7, 2, 3, 4], 4, 32) == 3
    assert tree.matched([1, 2, 3, 4], 4, 32) == 4
    assert tree.matched([1, 2, 3, 4], 4, 2) == 2
    assert tree.matched([8], 4, 32) == 0


def both(tokens: list[int]) -> tuple[ContextTree, native.ContextTree]:
    """The two trees over a text, taken in as it might grow."""
    plain, quick = ContextTree(tokens), native.ContextTree()
    quick.follow(tokens[: len(tokens) // 2])
    quick.follow(tokens)
    plain.follow()
    return plain, quick


def compare(
    own: tuple[ContextTree, native.ContextTree],
    shared: tuple[ContextTree, native.ContextTree],
    budget: int,
    weights: list[float],
    luck: float,
) -> int:
    """Both searches find the same; returns how many nodes."""
    plain = search(own[0], shared[0], budget, weights, luck)
    quick = native.suffix_offer(own[1], shared[1], budget, weights, luck)
    assert quick.tokens == plain.tokens
    assert quick.parents == plain.parents
    assert quick.chances == np.float32(plain.chances).tolist()
    for place in range(ROOT, budget + 1):
        assert quick.guesses(place) == plain.guesses.get(place, [])
    for node, (parent, token) in enumerate(zip(plain.parents, plain.tokens, strict=True)):
        assert quick.child(parent, token) == node
        assert quick.child(parent, token + 1000) == ROOT
    return len(plain.tokens)


texts = st.lists(st.integers(0, 3), max_size=60)
histories = st.lists(st.integers(SEPARATOR, 3), max_size=80)


@settings(max_examples=400, deadline=None)
@given(texts, histories, st.integers(0, 16), st.floats(-3, 3), st.integers(0, 999))
def test_the_native_search_finds_what_the_plain_one_finds(text, history, budget, luck, seed):
    chance = random.Random(seed)
    weights = [chance.gauss(0.0, 1.0) for _ in range(LEFT_OVER + 4)]
    compare(both(text), both(history), budget, weights, luck)


def test_so_it_does_on_long_repetitive_texts():
    """Thousands of tokens: tables that grow, leaves of hundreds of positions, trails, all features."""
    chance = random.Random(7)
    found = 0
    for size in (1, 100, 3000):
        words = [[chance.randrange(2000) for _ in range(chance.randrange(1, 40))] for _ in range(60)]
        text = [token for _ in range(size) for token in chance.choice(words)][-4000:]
        history = [token for _ in range(size) for token in [*chance.choice(words), SEPARATOR]][-4000:]
        own, shared = both(text), both(history)
        for _ in range(60):
            weights = [chance.gauss(0.3, 1.0) for _ in range(LEFT_OVER + 4)]
            found += compare(own, shared, 16, weights, chance.gauss(0.0, 1.0))
            more = chance.choice(words)[:3]
            own[0].tokens.extend(more)
            own[0].follow()
            own[1].follow(own[0].tokens)
    assert found > 1000


def test_a_leaf_of_thousands_splits_alike():
    runs = [5] * 5000 + [6, 5, 5, 5]
    weights = [0.5] * (LEFT_OVER + 4)
    assert compare(both(runs), both([]), 16, weights, 0.0) > 8
    assert compare(both([5] * 20), both(runs), 16, weights, 0.0) > 8


def test_weights_of_another_layout_are_refused():
    with pytest.raises(ValueError, match="one weight per feature"):
        native.suffix_offer(native.ContextTree(), native.ContextTree(), 4, [0.0] * COUNTED, 0.0)
