"""Who owns which page of the KV cache: integers only, the arrays belong to the target.

A sequence is a list of pages of `page_size` slots. Its committed tokens fill the front; rows of a pass
are reserved behind them and stay provisional until `commit`. Every full committed page is a node of a
tree keyed by its tokens, so that equal prefixes, alive or finished, share pages. A page that only
partly matches is copied on write. Finished pages stay in the tree until their memory is needed; the
least recently used leaves go first.

Sharing one page between sequences that computed it apart is exact because the target's row values never
depend on the other rows of a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from paceline.core import Ids


class _Node:
    """A cached page: the tokens it holds, behind those of its parents. Fewer than a page's: a leaf that
    nobody reads in place, only a source for copies."""

    __slots__ = ("children", "page", "parent", "refs", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.refs = 0
        self.children: dict[tuple[int, ...], _Node] = {}


class KVSequence:
    """The pages of one request.

    Attributes:
        tokens: committed tokens, in slot order: their KV is in place.
    """

    __slots__ = ("_chain", "_pages", "_table", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._chain: list[_Node] = []  # nodes of the full committed pages
        self._pages: list[int] = []  # those, then the private ones: a partly committed page and reserved ones
        self._table: Ids = np.zeros(16, np.int32)  # _pages again, as the target wants them

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def table(self) -> Ids:
        """[P] page ids; a view that the next change of the sequence overwrites."""
        return self._table[: len(self._pages)]

    def _push(self, page: int) -> None:
        if len(self._pages) == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table[len(self._pages)] = page
        self._pages.append(page)

    def _replace(self, index: int, page: int) -> None:
        self._pages[index] = page
        self._table[index] = page


class KVCache:
    """Page tables, prefix tree, reference counts and eviction for any number of sequences.

    Args:
        pages: pages that the target owns, numbered from 0.
        page_size: slots of a page.
        copy_page: the target's `copy_page(source, target)`, called the moment a copy is due.
    """

    def __init__(self, pages: int, page_size: int, copy_page: Callable[[int, int], None]) -> None:
        assert pages > 0
        assert page_size > 0
        self.pages = pages
        self.page_size = page_size
        self._copy_page = copy_page
        self.clear()

    def clear(self) -> None:
        """Forget everything; sequences handed out before are void."""
        self._root = _Node(None, (), -1)
        self._free = list(range(self.pages - 1, -1, -1))
        self._idle: OrderedDict[_Node, None] = OrderedDict()  # unreferenced leaves, next to go first
        self._unreferenced = 0  # nodes nobody holds, leaves or not: all can be evicted in turn
        self._live: set[KVSequence] = set()

    @property
    def available(self) -> int:
        """Pages that can be handed out: free ones and cached ones that nobody holds."""
        return len(self._free) + self._unreferenced

    def slack(self, sequence: KVSequence) -> int:
        """Slots behind the committed tokens that the sequence's pages already cover."""
        return len(sequence._pages) * self.page_size - len(sequence)

    def open(self, tokens: Sequence[int]) -> KVSequence:
        """Start a sequence with the longest cached prefix of `tokens`, short of the last token.

        The last token is left to be computed, because its logits are wanted. `len()` of the result says
        how many tokens are in place.
        """
        sequence = KVSequence()
        self._live.add(sequence)
        size, limit = self.page_size, len(tokens) - 1
        node = self._root
        while len(sequence) + size <= limit:
            child = node.children.get(tuple(tokens[len(sequence) : len(sequence) + size]))
            if child is None:
                break
            self._share(sequence, child)
            node = child
        self._adopt(sequence, node, tokens[len(sequence) : max(limit, 0)][:size])
        return sequence

    def extend(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Take over the pages of `tokens`, short of the last, that others put in place since `open`.

        Args:
            tokens: begin with the sequence's committed tokens. Rows reserved behind those may be lost.
        """
        size = self.page_size
        while True:
            start = len(sequence._chain) * size
            if start + size >= len(tokens):
                return
            parent = sequence._chain[-1] if sequence._chain else self._root
            child = parent.children.get(tuple(tokens[start : start + size]))
            if child is None:
                return
            while len(sequence._pages) > len(sequence._chain):
                self._free.append(sequence._pages.pop())
            del sequence.tokens[start:]
            self._share(sequence, child)

    def fork(self, sequence: KVSequence, length: int) -> KVSequence:
        """Start a second sequence with the first `length` committed tokens of another.

        Full pages are shared, the rest is copied; without a page for the copy the fork is shorter.
        """
        assert 0 <= length <= len(sequence)
        twin = KVSequence()
        self._live.add(twin)
        for node in sequence._chain[: length // self.page_size]:
            self._share(twin, node)
        tail = sequence.tokens[len(twin) : length]
        page = self._take() if tail else None
        if page is not None:
            self._copy_page(sequence._pages[len(twin._chain)], page)
            twin._push(page)
            twin.tokens.extend(tail)
        return twin

    def reserve(self, sequence: KVSequence, rows: int) -> bool:
        """Cover `rows` slots behind the committed tokens. False, and no change, when pages are short."""
        missing = -((self.slack(sequence) - rows) // self.page_size)
        if missing > self.available:
            return False
        for _ in range(missing):
            page = self._take()
            assert page is not None
            sequence._push(page)
        return True

    def commit(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Declare that the next slots hold these tokens, and roll back everything behind them.

        A tree path must lie in consecutive slots by now (`Target.move`).
        """
        assert len(tokens) <= self.slack(sequence)
        sequence.tokens.extend(tokens)
        while (len(sequence._chain) + 1) * self.page_size <= len(sequence):
            self._publish(sequence)
        self.rollback(sequence)

    def rollback(self, sequence: KVSequence) -> None:
        """Give back reserved pages behind the committed tokens."""
        kept = -(-len(sequence) // self.page_size)
        while len(sequence._pages) > kept:
            self._free.append(sequence._pages.pop())

    def free(self, sequence: KVSequence) -> None:
        """End a sequence; what it committed stays cached until its memory is needed."""
        self._live.remove(sequence)
        self.rollback(sequence)
        chain = sequence._chain
        tail = tuple(sequence.tokens[len(chain) * self.page_size :])
        if tail:
            parent, page = (chain[-1] if chain else self._root), sequence._pages.pop()
            if any(child.tokens[: len(tail)] == tail for child in parent.children.values()):
                self._free.append(page)
            else:
                self._release(self._insert(parent, tail, page))
        for node in reversed(chain):
            self._release(node)

    def check_integrity(self) -> None:
        """Assert that every page has exactly one owner and every count is right."""
        owner: dict[int, object] = dict.fromkeys(self._free, "free")
        assert len(owner) == len(self._free)
        holders: dict[_Node, int] = {}
        for sequence in self._live:
            self._check_sequence(sequence, owner, holders)
        unreferenced, leaves = 0, set()
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            assert node.page not in owner
            owner[node.page] = node
            self._check_node(node, holders.pop(node, 0))
            unreferenced += node.refs == 0
            if node.refs == 0 and not node.children:
                leaves.add(node)
            stack.extend(node.children.values())
        assert not holders, "a sequence holds a node that left the tree"
        assert sorted(owner) == list(range(self.pages)), "pages leaked"
        assert unreferenced == self._unreferenced
        assert leaves == set(self._idle)

    def _check_sequence(
        self, sequence: KVSequence, owner: dict[int, object], holders: dict[_Node, int]
    ) -> None:
        size, chain = self.page_size, sequence._chain
        assert len(chain) == len(sequence) // size
        assert len(sequence._pages) >= -(-len(sequence) // size)
        assert sequence.table.tolist() == sequence._pages
        parent = self._root
        for index, node in enumerate(chain):
            assert node.parent is parent
            assert node.page == sequence._pages[index]
            assert list(node.tokens) == sequence.tokens[index * size : (index + 1) * size]
            holders[node] = holders.get(node, 0) + 1
            parent = node
        for page in sequence._pages[len(chain) :]:
            assert page not in owner
            owner[page] = sequence

    def _check_node(self, node: _Node, holders: int) -> None:
        assert node.refs == holders
        assert node.parent is not None
        assert node.parent.children[node.tokens] is node
        assert 0 < len(node.tokens) <= self.page_size
        assert len(node.tokens) == self.page_size or (not node.children and node.refs == 0)
        assert node.parent is self._root or node.parent.refs >= node.refs

    def _share(self, sequence: KVSequence, node: _Node) -> None:
        self._hold(node)
        sequence._chain.append(node)
        sequence._push(node.page)
        sequence.tokens.extend(node.tokens)

    def _adopt(self, sequence: KVSequence, parent: _Node, tokens: Sequence[int]) -> None:
        """Reuse the child of `parent` that shares most of its front with `tokens`, in a private page."""
        best, count = parent, 0
        for child in parent.children.values():
            common = _common(child.tokens, tokens)
            if common > count:
                best, count = child, common
        if not count:
            return
        if count == len(best.tokens) < self.page_size:
            page: int | None = self._remove(best)  # what follows extends it: no copy, no second page
        else:
            self._hold(best)
            page = self._take()
            if page is not None:
                self._copy_page(best.page, page)
            self._release(best)
        if page is not None:
            sequence._push(page)
            sequence.tokens.extend(tokens[:count])

    def _publish(self, sequence: KVSequence) -> None:
        """Put the sequence's next full page into the tree, or exchange it for its equal there."""
        index = len(sequence._chain)
        tokens = tuple(sequence.tokens[index * self.page_size : (index + 1) * self.page_size])
        parent = sequence._chain[-1] if sequence._chain else self._root
        node = parent.children.get(tokens)
        if node is None:
            node = self._insert(parent, tokens, sequence._pages[index])
        else:
            self._free.append(sequence._pages[index])
            sequence._replace(index, node.page)
            self._hold(node)
        sequence._chain.append(node)

    def _insert(self, parent: _Node, tokens: tuple[int, ...], page: int) -> _Node:
        node = _Node(parent, tokens, page)
        node.refs = 1
        parent.children[tokens] = node
        return node

    def _hold(self, node: _Node) -> None:
        if node.refs == 0:
            self._unreferenced -= 1
            self._idle.pop(node, None)
        node.refs += 1

    def _release(self, node: _Node) -> None:
        node.refs -= 1
        if node.refs == 0:
            self._unreferenced += 1
            if not node.children:
                self._idle[node] = None

    def _remove(self, node: _Node) -> int:
        """Take an unreferenced leaf out of the tree and return its page."""
        del self._idle[node]
        self._unreferenced -= 1
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if parent is not self._root and parent.refs == 0 and not parent.children:
            # Its children were used no earlier than it was, so it is at least as old as what is next.
            self._idle[parent] = None
            self._idle.move_to_end(parent, last=False)
        return node.page

    def _take(self) -> int | None:
        """A page to write, evicting the least recently used cached one if none is free."""
        if self._free:
            return self._free.pop()
        if self._idle:
            return self._remove(next(iter(self._idle)))
        return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
