"""A tree over every context of a text, read backwards, with what followed each.

The path from the root spells a context from its last token to earlier ones; a node at depth m stands for
a context of m tokens. Both adding a token and finding the longest context known walk one path. The tree
is lazy: a context keeps a bare list of positions (a leaf) as long as one and the same token always
followed it, and becomes a node with counts when a second one does. So new text costs about one leaf per
token, copied text lengthens lists, and depth appears only where it decides something.

This is the suffix-link tree of the text's suffix automaton, cut at `DEPTH`, with counts (compare the
suffix trees of arXiv 2411.04975, and prediction by partial matching).
"""

from __future__ import annotations

from collections.abc import Sequence

SEPARATOR = -1
"""Stands between texts in a tree over several; no context reaches across it."""

DEPTH = 16
"""Longest context that gets counts of its own; longer matches are measured on the text."""

TOP = 4
"""How many of its likeliest followers a context keeps in order."""

_SPLIT = 64
"""Most positions that are handed down when a leaf splits; older ones stay counted in the node."""


class Node:
    """A context that different tokens followed.

    Attributes:
        children: token before the context -> longer context: a node, or a leaf's newest position.
        counts: token that followed -> how often.
        top: the TOP most frequent of them, best first; the newer first among equals.
        total: sum of counts.
    """

    __slots__ = ("children", "counts", "top", "total")

    def __init__(self) -> None:
        self.children: dict[int, Node | int] = {}
        self.counts: dict[int, int] = {}
        self.top: list[int] = []
        self.total = 0

    def count(self, token: int) -> None:
        count = self.counts.get(token, 0) + 1
        self.counts[token] = count
        self.total += 1
        top = self.top
        if top and top[0] == token:
            return
        if token in top:
            top.remove(token)
        elif len(top) >= TOP:
            if self.counts[top[-1]] > count:
                return
            top.pop()
        at = len(top)
        while at and self.counts[top[at - 1]] <= count:
            at -= 1
        top.insert(at, token)


class ContextTree:
    """Contexts of `tokens`, which grows in place and is only read.

    A leaf is the newest position p at which its context was followed by tokens[p]; `older[p]` is the one
    before it in the same leaf, or -1.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.root = Node()
        self.older: list[int] = []

    def follow(self) -> None:
        """Take in what was appended to `tokens` since the last call; time O(DEPTH) per token."""
        for i in range(len(self.older), len(self.tokens)):
            self.older.append(-1)
            if self.tokens[i] != SEPARATOR:
                self._add(i)

    def _add(self, i: int) -> None:
        tokens = self.tokens
        token = tokens[i]
        node = self.root
        for depth in range(1, min(DEPTH, i) + 1):
            before = tokens[i - depth]
            if before == SEPARATOR:
                return
            children = node.children
            child = children.get(before)
            if child is None:
                children[before] = i
                return
            if type(child) is int:
                if tokens[child] == token:
                    self.older[i] = child
                    children[before] = i
                    return
                child = children[before] = self._split(child, depth)
            assert type(child) is Node
            child.count(token)
            node = child

    def _split(self, newest: int, depth: int) -> Node:
        """Make a node of a leaf whose context is `depth` tokens long."""
        positions = []
        p = newest
        while p >= 0:
            positions.append(p)
            p = self.older[p]
        node = Node()
        token = self.tokens[newest]
        node.counts[token] = node.total = len(positions)
        node.top.append(token)
        if depth == DEPTH:
            return node
        for p in reversed(positions[:_SPLIT]):
            at = p - depth - 1
            if at >= 0 and (before := self.tokens[at]) != SEPARATOR:
                child = node.children.get(before, -1)
                assert type(child) is int
                self.older[p] = child
                node.children[before] = p
        return node

    def contexts(self, text: Sequence[int]) -> tuple[list[Node], int]:
        """Return the known contexts that `text` ends with.

        Returns:
            (nodes, leaf): nodes[m-1] is the node for the last m tokens; leaf is the newest position of
            the leaf that the next longer context ends in, or -1 when that context is unknown.
        """
        nodes: list[Node] = []
        node = self.root
        for token in text[: -DEPTH - 1 : -1]:
            child = node.children.get(token)
            if child is None:
                return nodes, -1
            if type(child) is int:
                return nodes, child
            assert type(child) is Node
            nodes.append(child)
            node = child
        return nodes, -1

    def matched(self, text: Sequence[int], position: int, limit: int) -> int:
        """How many of the last tokens of `text` equal those before `position`; at most `limit`."""
        tokens = self.tokens
        length = 0
        limit = min(limit, position, len(text))
        while length < limit and tokens[position - length - 1] == text[-length - 1]:
            length += 1
        return length
