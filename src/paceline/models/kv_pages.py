"""What the ledger of cache pages is made of: cached pages as nodes of a tree, and a sequence's page ids."""

from __future__ import annotations

import numpy as np

from paceline.core import Ids


class Node:
    """A cached page: the tokens it holds, behind those of its parents. Fewer than a page's: a leaf that
    nobody reads in place, only a source for copies.

    Attributes:
        page: its page.
        refs: sequences that hold it.
        near: its page of layers with a window; -1 where that was taken for something else, or none has one.
        near_refs: sequences that hold that.
        fork: texts part within sight of it.
    """

    __slots__ = ("children", "fork", "near", "near_refs", "page", "parent", "refs", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.refs = 0
        self.near = -1
        self.near_refs = 0
        self.fork = False
        self.children: dict[tuple[int, ...], Node] = {}


class PageTable:
    """Page ids in order, as a list and as the array that the target wants."""

    __slots__ = ("_array", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._array: Ids = np.zeros(16, np.int32)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def array(self) -> Ids:
        """[P] page ids; a view that the next change overwrites."""
        return self._array[: len(self.ids)]

    def push(self, page: int) -> None:
        if len(self.ids) == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[len(self.ids)] = page
        self.ids.append(page)

    def replace(self, index: int, page: int) -> None:
        self.ids[index] = page
        self._array[index] = page

    def pop(self) -> int:
        return self.ids.pop()
