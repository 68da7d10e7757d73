"""Who owns which page of the layers with a sliding window.

A sequence holds those that its next rows see, and gives back the others as it grows. What nobody holds
stays readable in the tree of `kv.KVCache` until its memory is needed: first goes what a growing text has left
behind, last what a finished text may be continued from. A text can only go on behind a cached prefix if all
pages within sight are still there. Where texts are known to part, they are kept like a finished text's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from paceline.core import WindowPages
from paceline.models.kv_pages import Node, PageTable


class NearPages:
    """One sequence's pages of layers with a window; as many entries as it has pages of the others.

    Attributes:
        table: page ids; those before `first` are stale.
        held: which of them the sequence holds. Not those before `first`, nor reserved ones that are written
            over before they count; see `WindowPool.reserve`.
    """

    __slots__ = ("first", "held", "table")

    def __init__(self) -> None:
        self.table = PageTable()
        self.held: list[bool] = []
        self.first = 0

    def oldest(self, start: int) -> int:
        """The first entry from `start` on that is held."""
        while start < len(self.held) and not self.held[start]:
            start += 1
        return start

    def push(self, page: int, *, held: bool = True) -> None:
        self.table.push(page)
        self.held.append(held)

    def pop(self) -> int:
        self.held.pop()
        return self.table.pop()


class WindowPool:
    """Pages, their holders, and the order in which they are taken for something else.

    Args:
        spec: how many pages there are, and who sees them.
        page_size: slots of a page.

    Attributes:
        sight: pages before its own that the row at the start of a page sees.
        most: pages that a pass sees, or the row that follows when a pass was given up.
    """

    def __init__(self, spec: WindowPages, page_size: int) -> None:
        self.spec = spec
        self.sight = -(-(spec.size - 1) // page_size)
        self.most = -(-(spec.size - 1 + spec.rows) // page_size) + 2
        self._page_size = page_size
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._free = list(range(self.spec.pages - 1, -1, -1))
        self._fresh = self.spec.pages  # of the free ones, at the front: never written, so they cost no memory
        self._left: OrderedDict[Node, None] = OrderedDict()  # by growing texts
        self._idle: OrderedDict[Node, None] = OrderedDict()  # of finished texts, next to go first

    @property
    def used(self) -> float:
        """Share of the pages that sequences hold."""
        return 1.0 - self.available / self.spec.pages

    @property
    def available(self) -> int:
        """Pages that can be handed out."""
        return len(self._free) + len(self._left) + len(self._idle)

    def first(self, length: int) -> int:
        """The first page that the row behind `length` tokens sees."""
        return max(0, length - self.spec.size + 1) // self._page_size

    def covers(self, chain: Sequence[Node], length: int) -> bool:
        """Whether these pages are all that is seen of them behind `length` tokens."""
        return all(node.near >= 0 for node in chain[self.first(length) :])

    def deepest(self, nodes: Sequence[Node], start: int = 0) -> int:
        """How many of these pages, the first of them page `start`, can be used; those before are there."""
        best, gap = 0, -1
        for count, node in enumerate(nodes, 1):
            if node.near < 0:
                gap = start + count - 1
            if self.first((start + count) * self._page_size) > gap:
                best = count
        return best

    def join(self, near: NearPages, nodes: Sequence[Node], length: int) -> None:
        """Add nodes as entries, and hold what is seen of them behind `length` tokens."""
        first = self.first(length)
        for node in nodes:
            held = len(near.held) >= first
            if held:
                self.hold(node)
            near.push(max(node.near, 0), held=held)

    def shortage(self, near: NearPages, count: int) -> int:
        """Pages that a text needs to grow by `count` pages, leaving others behind as it goes."""
        return min(count, max(0, self.sight + 2 - len(near.held) + near.first))

    def takes(self, near: NearPages, count: int, settled: int, span: int) -> int:
        """Pages that `reserve` takes."""
        return max(0, min(count, near.oldest(settled) + span - len(near.held)))

    def reserve(self, near: NearPages, count: int, settled: int, span: int) -> None:
        """Add pages, of which there must be enough.

        A long reservation goes through a few in turn: what comes late is written over what came early, which
        by then no row sees.

        Args:
            settled: entries that hold committed tokens.
            span: how many, at least `most`.
        """
        oldest = near.oldest(settled)
        for _ in range(count):
            if oldest + span <= len(near.held):
                near.held[oldest] = False
                near.push(near.table.ids[oldest])
                oldest += 1
            else:
                near.push(self.take())

    def publish(self, near: NearPages, index: int, node: Node) -> None:
        """Make an entry that of a node: hand over its page, or exchange it for the one that is there."""
        if not near.held[index]:
            return
        page = near.table.ids[index]
        if node.near < 0:
            node.near = page
        elif node.near != page:
            self.give(page)
            near.table.replace(index, node.near)
        self.hold(node)

    def slide(self, near: NearPages, chain: Sequence[Node], length: int) -> None:
        """Leave behind what is not seen behind `length` tokens."""
        first = self.first(length)
        for index in range(near.first, first):
            if near.held[index]:
                near.held[index] = False
                self.release(chain[index], left=True)
        near.first = first
        assert all(near.held[first:]), "more was given up than a reservation may"

    def leave(self, node: Node, page: int) -> None:
        """Let a node that nobody holds have a finished text's page, if it has none."""
        if node.near >= 0:
            self.give(page)
            return
        node.near = page
        self._idle[node] = None

    def cut(self, near: NearPages, count: int) -> None:
        """Give back the entries from `count` on; they belong to no node."""
        while len(near.held) > count:
            held, page = near.held[-1], near.pop()
            if held:
                self.give(page)

    def hold(self, node: Node) -> None:
        if node.near_refs == 0:
            self._left.pop(node, None)
            self._idle.pop(node, None)
        node.near_refs += 1

    def release(self, node: Node, *, left: bool = False) -> None:
        """Let go of a node's page.

        Args:
            left: a growing text has left it behind.
        """
        node.near_refs -= 1
        if node.near_refs == 0:
            (self._left if left and not node.fork else self._idle)[node] = None

    def part(self, node: Node) -> None:
        """Keep what is seen behind this node, where texts part: a third one may come."""
        seen: Node | None = node
        for _ in range(self.sight):
            if seen is None:
                return
            seen.fork = True
            if seen in self._left:
                del self._left[seen]
                self._idle[seen] = None
            seen = seen.parent

    def take(self) -> int:
        """A page to write; there must be one. Memory that was never used is left for when it must be."""
        if len(self._free) > self._fresh:
            return self._free.pop()
        if self._left:
            return self.strip(next(iter(self._left)))
        if not self._free:
            return self.strip(next(iter(self._idle)))
        self._fresh -= 1
        return self._free.pop()

    def strip(self, node: Node) -> int:
        """Take the page of a node that nobody holds."""
        page, node.near = node.near, -1
        self._left.pop(node, None)
        self._idle.pop(node, None)
        return page

    def give(self, page: int) -> None:
        """Put a page back that nobody reads."""
        self._free.append(page)

    def check_integrity(
        self, nodes: Sequence[Node], held: Sequence[tuple[NearPages, Sequence[Node], int]]
    ) -> None:
        """Assert that every page has exactly one owner, and every sequence what its next row sees.

        Args:
            nodes: all there are.
            held: of each live sequence its entries, nodes and length.
        """
        owned, refs = list(self._free), dict.fromkeys(nodes, 0)
        for near, chain, length in held:
            assert len(near.held) == len(near.table)
            assert near.table.array.tolist() == near.table.ids
            assert near.first == self.first(length)
            assert all(near.held[near.first : -(-length // self._page_size)])
            for index in [i for i, its in enumerate(near.held) if its]:
                assert index >= near.first
                if index >= len(chain):
                    owned.append(near.table.ids[index])
                    continue
                assert chain[index].near == near.table.ids[index]
                refs[chain[index]] += 1
        there = [node for node in nodes if node.near >= 0]
        owned += [node.near for node in there]
        assert sorted(owned) == list(range(self.spec.pages)), "pages leaked"
        assert all(node.near_refs == count for node, count in refs.items())
        assert not self._left.keys() & self._idle.keys()
        assert self._left.keys() | self._idle.keys() == {node for node in there if not node.near_refs}
        assert 0 <= self._fresh <= len(self._free)
