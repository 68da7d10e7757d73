"""Merging and pruning draft trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import ROOT, Draft
from paceline.planning.merge import allowed, merge, select
from support.grammars import Listed


def tree(*nodes: tuple[int, int, float], source: str = "a") -> Draft:
    """Nodes as (token, parent, chance)."""
    tokens, parents, chances = zip(*nodes, strict=True) if nodes else ((), (), ())
    return Draft(list(tokens), list(parents), list(chances), (source,) * len(nodes))


def rows(draft: Draft) -> list[tuple[int, int, float, str]]:
    return [
        (t, p, round(c, 6), s)
        for t, p, c, s in zip(
            draft.tokens,
            draft.parents,
            draft.chances,
            draft.sources,
            strict=True,
        )
    ]


def test_equal_prefixes_merge_and_the_better_claim_stands():
    one = tree((5, ROOT, 0.5), (6, 0, 0.4), source="one")
    two = tree((5, ROOT, 0.6), (6, 0, 0.3), (7, 1, 0.9), source="two")
    assert rows(merge([one, two])) == [
        (5, ROOT, 0.6, "two"),
        (6, 0, 0.4, "one"),
        (7, 1, 0.9, "two"),
    ]


def test_different_continuations_branch():
    one = tree((5, ROOT, 0.5), (6, 0, 0.4), source="one")
    two = tree((5, ROOT, 0.5), (9, 0, 0.3), source="two")
    assert rows(merge([one, two])) == [
        (5, ROOT, 0.5, "one"),
        (6, 0, 0.4, "one"),
        (9, 0, 0.3, "two"),
    ]


def test_siblings_that_claim_more_than_certainty_share_it():
    merged = merge([tree((5, ROOT, 0.9)), tree((6, ROOT, 0.6))])
    assert merged.chances == pytest.approx([0.6, 0.4])


def test_one_draft_or_none_is_left_alone():
    one = tree((5, ROOT, 0.5))
    assert merge([Draft.empty(), one, Draft.empty()]) is one
    assert len(merge([])) == len(merge([Draft.empty()])) == 0


def test_select_keeps_order_and_renumbers_parents():
    draft = tree((1, ROOT, 0.9), (2, 0, 0.8), (3, ROOT, 0.1), (4, 2, 0.7), (5, 1, 0.6))
    assert rows(select(draft, [0, 2, 3])) == [
        (1, ROOT, 0.9, "a"),
        (3, ROOT, 0.1, "a"),
        (4, 1, 0.7, "a"),
    ]
    assert rows(select(draft, [0, 1])) == rows(draft)[:2]
    assert select(draft, [0, 1, 2, 3, 4]) is draft
    assert len(select(draft, [])) == 0


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    nodes: dict[tuple[int, int], float] = {}
    for i in range(draw(st.integers(0, 7))):
        parent = draw(st.integers(-1, i - 1)) if nodes else ROOT
        parent = min(parent, len(nodes) - 1)
        nodes.setdefault((parent, draw(st.integers(0, 3))), draw(st.floats(0, 0.25, width=32)))
    return tree(*((token, parent, chance) for (parent, token), chance in nodes.items()))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    assert len(set(found)) == len(found)
    return set(found)


@settings(max_examples=200, deadline=None)
@given(st.lists(drafts(), max_size=4))
def test_merging_is_the_union_of_the_paths(some):
    merged = merge(some)
    assert paths(merged) == set().union(*(paths(draft) for draft in some))
    assert all(p < i for i, p in enumerate(merged.parents))


def test_what_a_constraint_forbids_goes_with_all_that_follows_it():
    draft = tree(
        (1, ROOT, 0.5), (2, ROOT, 0.4), (3, 0, 0.9), (4, 0, 0.1), (3, 1, 0.8), (5, 2, 0.7), (6, 4, 0.6)
    )
    kept = allowed(draft, Listed([[1, 9], [3], [5, 6]], 32))
    assert rows(kept) == [(1, ROOT, 0.5, "a"), (3, 0, 0.9, "a"), (5, 1, 0.7, "a")]
    assert len(allowed(draft, Listed([[9]], 32))) == 0
    assert allowed(draft, None) is draft
    assert allowed(draft, Listed([], 32)) is draft
    drawn = replace(draft, probs=np.full((len(draft), 32), 1 / 32, np.float32))
    assert allowed(drawn, Listed([[9]], 32)) is drawn


@settings(max_examples=100, deadline=None)
@given(
    parents=st.lists(st.integers(-1, 8), max_size=12),
    steps=st.lists(st.one_of(st.none(), st.lists(st.integers(0, 30), max_size=20)), max_size=6),
)
def test_what_is_left_is_what_the_constraint_lets_through_node_by_node(parents, steps):
    nodes = [(i * 2 % 31, min(parent, i - 1), 0.5) for i, parent in enumerate(parents)]
    draft, constraint = tree(*nodes), Listed(steps, 32)
    expected: list[int] = []
    depth: dict[int, int] = {ROOT: -1}
    for i, (token, parent, _) in enumerate(nodes):
        depth[i] = depth[parent] + 1
        now = steps[depth[i]] if depth[i] < len(steps) else None
        if (parent == ROOT or parent in expected) and (now is None or token in now):
            expected.append(i)
    assert allowed(draft, constraint).tokens == [2 * i for i in expected]
