"""Who owns which page of the KV cache: integers only, the arrays belong to the target.

A sequence is a list of pages of `page_size` slots. Its committed tokens fill the front; rows of a pass
are reserved behind them and stay provisional until `commit`. Every full committed page is a node of a
tree keyed by its tokens, so that equal prefixes, alive or finished, share pages. A page that only
partly matches is copied on write. Finished pages stay in the tree until their memory is needed; the
least recently used leaves go first.

Layers with a sliding window have pages of their own, one beside each of the others as long as a row sees
it; see `window_pool`.

Sharing one page between sequences that computed it apart is exact because the target's row values never
depend on the other rows of a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from paceline.core import Ids, WindowPages
from paceline.models.kv_pages import Node, PageTable
from paceline.models.window_pool import NearPages, WindowPool


class KVSequence:
    """The pages of one request.

    Attributes:
        tokens: committed tokens, in slot order: their KV is in place.
    """

    __slots__ = ("_chain", "_near", "_pages", "tokens")

    def __init__(self, near: NearPages | None = None) -> None:
        self.tokens: list[int] = []
        self._chain: list[Node] = []  # nodes of the full committed pages
        self._pages = PageTable()  # those, then the private ones: a partly committed page and reserved ones
        self._near = near

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def table(self) -> Ids:
        """[P] page ids; a view that the next change of the sequence overwrites."""
        return self._pages.array

    @property
    def window_table(self) -> Ids | None:
        """[P] page ids for layers with a window, right where a row sees them; None if no layer has one."""
        return None if self._near is None else self._near.table.array


def tables(sequences: Sequence[KVSequence]) -> tuple[Ids, Ids | None]:
    """[S, P] page ids of several sequences, and those for layers with a window; short ones end in page 0."""
    if len(sequences) == 1:
        near = sequences[0].window_table
        return sequences[0].table[None], None if near is None else near[None]
    windows = [near for sequence in sequences if (near := sequence.window_table) is not None]
    return padded([sequence.table for sequence in sequences]), padded(windows) if windows else None


def padded(rows: Sequence[Ids]) -> Ids:
    """[S, P] page tables, shorter ones filled up with page 0."""
    wide = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for line, row in zip(wide, rows, strict=True):
        line[: len(row)] = row
    return wide


class Paged(Protocol):
    """What has cache pages; see `core.Target`."""

    pages: int
    page_size: int

    @property
    def window(self) -> WindowPages | None: ...

    def copy_page(self, source: int, target: int) -> None: ...


class KVCache:
    """Page tables, prefix tree, reference counts and eviction for any number of sequences.

    Args:
        pages: pages that the target owns, numbered from 0.
        page_size: slots of a page.
        copy_page: the target's `copy_page(source, target)`, called the moment a copy is due.
        window: the pages of layers with a window, if there are any.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        copy_page: Callable[[int, int], None],
        window: WindowPages | None = None,
    ) -> None:
        assert pages > 0
        assert page_size > 0
        self.pages = pages
        self.page_size = page_size
        self._copy_page = copy_page
        self._window = None if window is None else WindowPool(window, page_size)
        self.clear()

    @classmethod
    def of(cls, owner: Paged) -> KVCache:
        """A cache of all pages that a model has."""
        return cls(owner.pages, owner.page_size, owner.copy_page, owner.window)

    def clear(self) -> None:
        """Forget everything; sequences handed out before are void."""
        self._root = Node(None, (), -1)
        self._free = list(range(self.pages - 1, -1, -1))
        self._idle: OrderedDict[Node, None] = OrderedDict()  # unreferenced leaves, next to go first
        self._unreferenced = 0  # nodes nobody holds, leaves or not: all can be evicted in turn
        self._live: set[KVSequence] = set()
        if self._window is not None:
            self._window.clear()

    @property
    def available(self) -> int:
        """Pages that can be handed out: free ones and cached ones that nobody holds."""
        return self._spare if self._window is None else min(self._spare, self._window.available)

    @property
    def used(self) -> float:
        """Share of the pages that sequences hold."""
        used = 1.0 - self._spare / self.pages
        return used if self._window is None else max(used, self._window.used)

    @property
    def _spare(self) -> int:
        return len(self._free) + self._unreferenced

    def slack(self, sequence: KVSequence) -> int:
        """Slots behind the committed tokens that the sequence's pages already cover."""
        return len(sequence._pages) * self.page_size - len(sequence)

    def fits(self, rows: Sequence[tuple[KVSequence, int]], spare: int = 0) -> bool:
        """Whether each of these sequences could grow by so many rows, and `spare` pages be left."""
        missing = [self._missing(sequence, count) for sequence, count in rows]
        if sum(missing) + spare > self._spare:
            return False
        if (window := self._window) is None:
            return True
        short = 0
        for (sequence, _), count in zip(rows, missing, strict=True):
            assert sequence._near is not None
            short += window.shortage(sequence._near, count)
        return short + spare <= window.available

    def open(self, tokens: Sequence[int]) -> KVSequence:
        """Start a sequence with the longest cached prefix of `tokens`, short of the last token.

        The last token is left to be computed, because its logits are wanted. `len()` of the result says
        how many tokens are in place.
        """
        sequence = self._begin()
        chain = self._match(self._root, tokens)
        length = len(chain) * self.page_size
        rest = tokens[length : max(len(tokens) - 1, 0)][: self.page_size]
        source, count = self._closest(chain[-1] if chain else self._root, rest)
        if self._window is not None:
            if chain and _parts(chain[-1], tokens[length : length + self.page_size]):
                self._window.part(chain[-1])
            if count and not self._window.covers(chain, length + count):
                count = 0
            if not count:
                chain = chain[: self._window.deepest(chain)]
        self._share(sequence, chain, len(chain) * self.page_size + count)
        if count and not self._adopt(sequence, source, rest[:count]):
            self._shorten(sequence)
        return sequence

    def extend(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Take over the pages of `tokens`, short of the last, that others put in place since `open`.

        Args:
            tokens: begin with the sequence's committed tokens. Rows reserved behind those may be lost.
        """
        depth = len(sequence._chain)
        found = self._match(sequence._chain[-1] if depth else self._root, tokens, depth * self.page_size)
        if self._window is not None:
            found = found[: self._window.deepest(found, depth)]
        if not found:
            return
        self._cut(sequence, depth)
        del sequence.tokens[depth * self.page_size :]
        self._share(sequence, found, (depth + len(found)) * self.page_size)

    def fork(self, sequence: KVSequence, length: int) -> KVSequence:
        """Start a second sequence with the first `length` committed tokens of another.

        Full pages are shared, the rest is copied; without a page for the copy, or where layers with a window
        have left behind what it takes, the fork is shorter.
        """
        assert 0 <= length <= len(sequence)
        depth = length // self.page_size
        chain, tail = sequence._chain[:depth], sequence.tokens[depth * self.page_size : length]
        node = sequence._chain[depth] if depth < len(sequence._chain) else None
        if self._window is not None:
            there = self._window.covers(chain, length) and (node is None or not tail or node.near >= 0)
            if not there:
                return self.open([*sequence.tokens[:length], 0])
        twin = self._begin()
        self._share(twin, chain, length)
        if not tail:
            return twin
        if node is None:
            near = -1 if sequence._near is None else sequence._near.table.ids[depth]
            copied = self._copy(twin, sequence._pages.ids[depth], near, tail)
        else:
            copied = self._adopt(twin, node, tail)
        if not copied:
            self._shorten(twin)
        return twin

    def reserve(self, sequence: KVSequence, rows: int, loose: int = 0) -> bool:
        """Cover `rows` slots behind the committed tokens. False, and no change, when pages are short.

        With a window, they are computed in passes of at most `WindowPages.rows`, and at most so many of them,
        and `loose` more, are rolled back.
        """
        missing, window, near = self._missing(sequence, rows), self._window, sequence._near
        if missing > self._spare:
            return False
        if window is not None and near is not None:
            settled = -(-len(sequence) // self.page_size)
            span = window.most + -(-loose // self.page_size)
            if window.takes(near, missing, settled, span) > window.available:
                return False
            window.reserve(near, missing, settled, span)
        for _ in range(missing):
            page = self._take()
            assert page is not None
            sequence._pages.push(page)
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
        if self._window is not None and sequence._near is not None:
            self._window.slide(sequence._near, sequence._chain, len(sequence))

    def rollback(self, sequence: KVSequence) -> None:
        """Give back reserved pages behind the committed tokens."""
        self._cut(sequence, -(-len(sequence) // self.page_size))

    def free(self, sequence: KVSequence) -> None:
        """End a sequence; what it committed stays cached until its memory is needed."""
        self._live.remove(sequence)
        self.rollback(sequence)
        self._leave_tail(sequence)
        self._let_go(sequence)

    def check_integrity(self) -> None:
        """Assert that every page has exactly one owner and every count is right."""
        owner: dict[int, object] = dict.fromkeys(self._free, "free")
        assert len(owner) == len(self._free)
        holders: dict[Node, int] = {}
        for sequence in self._live:
            self._check_sequence(sequence, owner, holders)
        nodes = self._nodes()
        for node in nodes:
            assert node.page not in owner
            owner[node.page] = node
            self._check_node(node, holders.pop(node, 0))
        assert not holders, "a sequence holds a node that left the tree"
        assert sorted(owner) == list(range(self.pages)), "pages leaked"
        idle = [node for node in nodes if node.refs == 0]
        assert len(idle) == self._unreferenced
        assert {node for node in idle if not node.children} == set(self._idle)
        if self._window is not None:
            held = [(near, s._chain, len(s)) for s in self._live if (near := s._near) is not None]
            self._window.check_integrity(nodes, held)

    def _nodes(self) -> list[Node]:
        found, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def _check_sequence(
        self, sequence: KVSequence, owner: dict[int, object], holders: dict[Node, int]
    ) -> None:
        size, chain, pages = self.page_size, sequence._chain, sequence._pages.ids
        assert len(chain) == len(sequence) // size
        assert len(pages) >= -(-len(sequence) // size)
        assert sequence.table.tolist() == pages
        parent = self._root
        for index, node in enumerate(chain):
            assert node.parent is parent
            assert node.page == pages[index]
            assert list(node.tokens) == sequence.tokens[index * size : (index + 1) * size]
            holders[node] = holders.get(node, 0) + 1
            parent = node
        for page in pages[len(chain) :]:
            assert page not in owner
            owner[page] = sequence

    def _check_node(self, node: Node, holders: int) -> None:
        assert node.refs == holders
        assert node.parent is not None
        assert node.parent.children[node.tokens] is node
        assert 0 < len(node.tokens) <= self.page_size
        assert len(node.tokens) == self.page_size or (not node.children and node.refs == 0)
        assert node.parent is self._root or node.parent.refs >= node.refs

    def _begin(self) -> KVSequence:
        sequence = KVSequence(None if self._window is None else NearPages())
        self._live.add(sequence)
        return sequence

    def _missing(self, sequence: KVSequence, rows: int) -> int:
        """Pages that so many rows take behind those that are covered."""
        return max(0, -((self.slack(sequence) - rows) // self.page_size))

    def _match(self, node: Node, tokens: Sequence[int], start: int = 0) -> list[Node]:
        """The nodes below `node` that hold `tokens` from `start` on, short of the last."""
        chain: list[Node] = []
        size = self.page_size
        while start + size < len(tokens):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            chain.append(child)
            node, start = child, start + size
        return chain

    def _closest(self, parent: Node, tokens: Sequence[int]) -> tuple[Node, int]:
        """The child that shares most of its front with `tokens`, and how much."""
        best, count = parent, 0
        for child in parent.children.values():
            common = _common(child.tokens, tokens)
            if common > count and (self._window is None or child.near >= 0):
                best, count = child, common
        return best, count

    def _share(self, sequence: KVSequence, nodes: Sequence[Node], length: int) -> None:
        """Add nodes to a sequence that is about to hold `length` tokens."""
        for node in nodes:
            self._hold(node)
            sequence._chain.append(node)
            sequence._pages.push(node.page)
            sequence.tokens.extend(node.tokens)
        if self._window is not None and sequence._near is not None:
            self._window.join(sequence._near, nodes, length)
            self._window.slide(sequence._near, sequence._chain, length)

    def _shorten(self, sequence: KVSequence) -> None:
        """Do without a tail: layers with a window may then have to see more of the pages before it."""
        if self._window is None:
            return
        chain = sequence._chain[: self._window.deepest(sequence._chain)]
        self._let_go(sequence)
        sequence.tokens, sequence._chain = [], []
        sequence._pages, sequence._near = PageTable(), NearPages()
        self._share(sequence, chain, len(chain) * self.page_size)

    def _let_go(self, sequence: KVSequence) -> None:
        """Release a sequence's nodes, the last one first."""
        near = sequence._near
        for index in range(len(sequence._chain) - 1, -1, -1):
            if self._window is not None and near is not None and near.held[index]:
                self._window.release(sequence._chain[index])
            self._release(sequence._chain[index])

    def _adopt(self, sequence: KVSequence, source: Node, tokens: Sequence[int]) -> bool:
        """Add a private page with these tokens, the front of a node's. False if there is none to be had."""
        if source.refs == 0 and len(tokens) == len(source.tokens) < self.page_size:
            # What follows extends it: no copy, no second page.
            near = -1 if self._window is None else self._window.strip(source)
            self._add_tail(sequence, self._remove(source), near, tokens)
            return True
        self._hold(source)
        if self._window is not None:
            self._window.hold(source)
        copied = self._copy(sequence, source.page, source.near, tokens)
        if self._window is not None:
            self._window.release(source)
        self._release(source)
        return copied

    def _copy(self, sequence: KVSequence, page: int, near: int, tokens: Sequence[int]) -> bool:
        window = self._window
        if window is not None and not window.available:
            return False
        own = self._take()
        if own is None:
            return False
        self._copy_page(page, own)
        own_near = -1
        if window is not None:
            own_near = window.take()
            window.spec.copy_page(near, own_near)
        self._add_tail(sequence, own, own_near, tokens)
        return True

    def _add_tail(self, sequence: KVSequence, page: int, near: int, tokens: Sequence[int]) -> None:
        sequence._pages.push(page)
        sequence.tokens.extend(tokens)
        if sequence._near is not None:
            sequence._near.push(near)

    def _leave_tail(self, sequence: KVSequence) -> None:
        """Leave the partly filled page of a sequence that ends as a leaf, unless there is one like it."""
        chain, window = sequence._chain, self._window
        tail = tuple(sequence.tokens[len(chain) * self.page_size :])
        if not tail:
            return
        page, near = sequence._pages.pop(), -1 if sequence._near is None else sequence._near.pop()
        parent = chain[-1] if chain else self._root
        like = next(
            (
                child
                for child in parent.children.values()
                if child.tokens[: len(tail)] == tail and (window is None or child.near >= 0)
            ),
            None,
        )
        if like is None and tail not in parent.children:
            node = self._insert(parent, tail, page)
            self._release(node)
        else:
            node = like or parent.children[tail]
            self._free.append(page)
        if window is not None:
            window.leave(node, near)

    def _publish(self, sequence: KVSequence) -> None:
        """Put the sequence's next full page into the tree, or exchange it for its equal there."""
        index = len(sequence._chain)
        tokens = tuple(sequence.tokens[index * self.page_size : (index + 1) * self.page_size])
        parent = sequence._chain[-1] if sequence._chain else self._root
        node, page = parent.children.get(tokens), sequence._pages.ids[index]
        if node is None:
            node = self._insert(parent, tokens, page)
        else:
            self._free.append(page)
            sequence._pages.replace(index, node.page)
            self._hold(node)
        sequence._chain.append(node)
        if self._window is not None and sequence._near is not None:
            self._window.publish(sequence._near, index, node)

    def _insert(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        node = Node(parent, tokens, page)
        node.refs = 1
        parent.children[tokens] = node
        return node

    def _hold(self, node: Node) -> None:
        if node.refs == 0:
            self._unreferenced -= 1
            self._idle.pop(node, None)
        node.refs += 1

    def _release(self, node: Node) -> None:
        node.refs -= 1
        if node.refs == 0:
            self._unreferenced += 1
            if not node.children:
                self._idle[node] = None

    def _remove(self, node: Node) -> int:
        """Take an unreferenced leaf out of the tree and return its page."""
        del self._idle[node]
        self._unreferenced -= 1
        if self._window is not None and node.near >= 0:
            self._window.give(self._window.strip(node))
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

    def _cut(self, sequence: KVSequence, count: int) -> None:
        """Give back the private pages from `count` on."""
        while len(sequence._pages) > count:
            self._free.append(sequence._pages.pop())
        if self._window is not None and sequence._near is not None:
            self._window.cut(sequence._near, count)


def _parts(node: Node, tokens: Sequence[int]) -> bool:
    """Whether these tokens go on otherwise than some text did behind this node."""
    return any(
        _common(child.tokens, tokens) < min(len(child.tokens), len(tokens))
        for child in node.children.values()
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
