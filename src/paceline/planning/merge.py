"""Drafts of several drafters, made one tree."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core import ROOT, Constraint, Draft


def merge(drafts: Sequence[Draft]) -> Draft:
    """Merge trees that share prefixes; a node offered twice keeps its larger chance and that one's source.

    Siblings exclude each other, so where independent drafters together claim more than certainty their
    claims are scaled down to sum to one.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if len(drafts) <= 1:
        return drafts[0] if drafts else Draft.empty()
    index: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    sources: list[str] = []
    for draft in drafts:
        place: list[int] = []
        rows = zip(draft.tokens, draft.parents, draft.chances, draft.sources, strict=True)
        for token, parent, chance, source in rows:
            above = parent if parent == ROOT else place[parent]
            node = index.setdefault((above, token), len(tokens))
            place.append(node)
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
                chances.append(chance)
                sources.append(source)
            elif chance > chances[node]:
                chances[node], sources[node] = chance, source
    _share(parents, chances)
    return Draft(tokens, parents, chances, tuple(sources))


def _share(parents: list[int], chances: list[float]) -> None:
    claimed: dict[int, float] = {}
    for parent, chance in zip(parents, chances, strict=True):
        claimed[parent] = claimed.get(parent, 0.0) + chance
    for i, parent in enumerate(parents):
        if claimed[parent] > 1.0:
            chances[i] /= claimed[parent]


def allowed(draft: Draft, constraint: Constraint | None) -> Draft:
    """Leave out nodes that the constraint would refuse, and what follows them.

    Not of drawn nodes: rejection sampling must see what was drawn, or it favours what is left.
    """
    if constraint is None or not len(draft) or draft.probs is not None:
        return draft
    parents = draft.parents
    inner = set(parents)
    kept: set[int] = set()
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while (parent := parents[path[-1]]) != ROOT:
                path.append(parent)
            path.reverse()
            kept.update(path[: constraint.accepts([draft.tokens[node] for node in path])])
    return select(draft, sorted(kept))


def select(draft: Draft, nodes: Sequence[int]) -> Draft:
    """Keep `nodes` (ascending, each with its ancestors) of a draft, in their order."""
    n = len(nodes)
    if n == len(draft):
        return draft
    if n == 0:
        return Draft.empty()
    if nodes[-1] == n - 1:
        probs = None if draft.probs is None else draft.probs[:n]
        return Draft(draft.tokens[:n], draft.parents[:n], draft.chances[:n], draft.sources[:n], probs)
    new = {ROOT: ROOT, **{old: i for i, old in enumerate(nodes)}}
    return Draft(
        [draft.tokens[i] for i in nodes],
        [new[draft.parents[i]] for i in nodes],
        [draft.chances[i] for i in nodes],
        tuple(draft.sources[i] for i in nodes),
        None if draft.probs is None else draft.probs[list(nodes)],
    )
