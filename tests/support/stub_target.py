"""A target whose logits are a fixed function of the token history it finds in its own KV slots.

Every slot stores one number, mixed from the token and the position written there. A row's history is the
sum over the slots it may see, looked up through tables, slots and parents exactly as `core.Rows` says.
A wrong slot, a stale row, a missed move or a bad page copy changes that sum, and with it the text.

With a window there is a second store, in which a row sees its last positions only; with one in all layers
the first store does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core import ROOT, Floats, Ids, Output, Rows, WindowPages

Hashes = NDArray[np.uint64]


class Rule(Protocol):
    """Logits as a function of the visible history."""

    vocab_size: int

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Floats:
        """[W, vocab] logits of rows with these history sums, own tokens and positions, all [W]."""
        ...


def mix(tokens: NDArray[np.integer], positions: NDArray[np.integer]) -> Hashes:
    """What a slot stores: a 64-bit mix (splitmix64's finaliser) of token and position."""
    x = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def states(histories: Hashes, tokens: NDArray[np.integer], layer: int) -> Floats:
    """[R, 3] what the stub shows of a layer: something of the history, the token, the layer."""
    seen = (histories % np.uint64(65521)).astype(np.float32)
    return np.stack([seen, tokens.astype(np.float32), np.full(len(tokens), layer, np.float32)], axis=1)


class RandomRule:
    """A random table indexed by the history: high entropy, nothing repeats by itself."""

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self._table = (np.random.default_rng(seed).normal(size=(509, vocab_size)) * scale).astype(np.float32)

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Floats:
        return self._table[(histories % np.uint64(len(self._table))).astype(np.intp)]


class RepetitiveRule:
    """Mostly a short cycle over the vocabulary, now and then thrown off by the history.

    Args:
        peak: how far the cycle's next token stands above the noise; about 3 gives some surprises.
    """

    def __init__(self, vocab_size: int, seed: int = 0, peak: float = 3.0, cycle: int = 5) -> None:
        self.vocab_size = vocab_size
        self._noise = RandomRule(vocab_size, seed, scale=1.0)
        self._peak = peak
        order = np.random.default_rng(seed + 1).permutation(vocab_size)
        self._next = np.empty(vocab_size, np.intp)
        for start in range(0, vocab_size, cycle):
            ring = order[start : start + cycle]
            self._next[ring] = np.roll(ring, -1)

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Floats:
        logits = self._noise.logits(histories, tokens, positions).copy()
        logits[np.arange(len(tokens)), self._next[tokens]] += self._peak
        return logits


class ScriptedRule:
    """Forces an output: the token after position p is script[p + 1 - start]; past its end, `after`."""

    def __init__(self, vocab_size: int, script: Sequence[int], start: int, after: int = 0) -> None:
        self.vocab_size = vocab_size
        self._script = np.asarray([*script, after], np.intp)
        self._start = start

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Floats:
        index = np.clip(positions + 1 - self._start, 0, len(self._script) - 1)
        logits = np.zeros((len(tokens), self.vocab_size), np.float32)
        logits[np.arange(len(tokens)), self._script[index]] = 50.0
        return logits


class FixedRule:
    """The same logits everywhere."""

    def __init__(self, logits: Sequence[float]) -> None:
        self.vocab_size = len(logits)
        self._logits = np.asarray(logits, np.float32)

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Floats:
        return np.tile(self._logits, (len(tokens), 1))


@dataclass
class StubTarget:
    """Implements `core.Target` over a `Rule`; refuses rows that break the contract.

    Attributes:
        sight: positions that a row sees through its window; 0 for none.
        everywhere: whether all layers have a window.
        window_pages: pages of the layers that have; None means as many as there are of the others.
        fail: raised by the next pass, once, before anything is written.
        row_counts: rows of every pass so far.
    """

    rule: Rule
    context_limit: int = 512
    max_rows: int = 64
    page_size: int = 8
    pages: int = 128
    sight: int = 0
    everywhere: bool = False
    window_pages: int | None = None
    fail: BaseException | None = None
    row_counts: list[int] = field(default_factory=list)
    heard: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.vocab_size = self.rule.vocab_size
        garbage = np.random.default_rng(99).integers(1, 2**62, self.pages * self.page_size)
        self._store: Hashes = garbage.astype(np.uint64)
        pages = self.window_pages or self.pages
        self._near: Hashes = np.resize(self._store[::-1], pages * self.page_size).copy()
        self.window = WindowPages(self.sight, pages, self.max_rows, self._copy_near) if self.sight else None
        self.touched: set[int] = set()  # pages of the second store that were written

    @property
    def passes(self) -> int:
        return len(self.row_counts)

    def forward(self, rows: Rows) -> Output:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self._check(rows)
        self.row_counts.append(len(rows.tokens))
        self._store[self._places(rows.tables, rows.sequences, rows.slots)] = mix(rows.tokens, rows.positions)
        histories = np.empty(len(rows.tokens), np.uint64)
        for sequence in np.unique(rows.sequences).tolist():
            self._read(rows, sequence, histories)
        if self.sight:
            histories = self._near_histories(rows, histories)
        wanted = rows.wanted
        logits = self.rule.logits(histories[wanted], rows.tokens[wanted], rows.positions[wanted])
        argmax = logits.argmax(axis=1).astype(np.int32)
        found = Output(argmax, logits if rows.logits else None)
        if self.heard:
            found.hidden = {layer: states(histories, rows.tokens, layer) for layer in self.heard}
        return found

    def listen(self, layers: Sequence[int]) -> None:
        self.heard = tuple(layers)

    def _near_histories(self, rows: Rows, histories: Hashes) -> Hashes:
        """What the rows see through their windows, together with what they see without."""
        tables = rows.tables if rows.window_tables is None else rows.window_tables
        places = self._places(tables, rows.sequences, rows.slots)
        self._near[places] = mix(rows.tokens, rows.positions)
        self.touched |= set((places // self.page_size).tolist())
        near = np.empty_like(histories)
        for row, position in enumerate(rows.positions.tolist()):
            slots = seen_slots(rows, row)[max(0, position + 1 - self.sight) :]
            sequence = np.full(len(slots), rows.sequences[row])
            near[row] = self._near[self._places(tables, sequence, slots)].sum()
        return near if self.everywhere else histories + np.uint64(3) * near

    def move(
        self, table: Ids, sources: Sequence[int], targets: Sequence[int], window_table: Ids | None = None
    ) -> None:
        assert list(sources) == sorted(set(sources))
        assert list(targets) == sorted(set(targets))
        assert all(s >= t for s, t in zip(sources, targets, strict=True))
        for source, target in zip(sources, targets, strict=True):
            self._store[self._place(table, target)] = self._store[self._place(table, source)]
            if self.sight:
                near = table if window_table is None else window_table
                self._near[self._place(near, target)] = self._near[self._place(near, source)]

    def copy_page(self, source: int, target: int) -> None:
        assert source != target
        size = self.page_size
        self._store[target * size : (target + 1) * size] = self._store[source * size : (source + 1) * size]

    def _copy_near(self, source: int, target: int) -> None:
        assert source != target
        size = self.page_size
        self._near[target * size : (target + 1) * size] = self._near[source * size : (source + 1) * size]
        self.touched.add(target)

    def _place(self, table: Ids, slot: int) -> int:
        return int(table[slot // self.page_size]) * self.page_size + slot % self.page_size

    def _places(self, tables: Ids, sequences: Ids, slots: Ids) -> NDArray[np.intp]:
        pages = tables[sequences, slots // self.page_size].astype(np.intp)
        return pages * self.page_size + slots % self.page_size

    def _read(self, rows: Rows, sequence: int, histories: Hashes) -> None:
        mine = np.flatnonzero(rows.sequences == sequence)
        slots = np.arange(int(rows.slots[mine].max()) + 1)
        stored = self._store[self._places(rows.tables, np.full(len(slots), sequence), slots)]
        upto = np.cumsum(stored)  # upto[p]: sum of slots 0..p
        for row in mine.tolist():
            parent = int(rows.parents[row])
            if parent == ROOT:
                histories[row] = upto[rows.positions[row]]
                continue
            total = stored[rows.slots[row] : rows.slots[row] + 1].copy()
            while rows.parents[parent] != ROOT:
                total += stored[rows.slots[parent]]
                parent = int(rows.parents[parent])
            histories[row] = (total + upto[rows.positions[parent]])[0]

    def _check(self, rows: Rows) -> None:
        count = len(rows.tokens)
        assert 0 < count <= self.max_rows
        for name in ("tokens", "positions", "slots", "parents", "sequences", "tables", "wanted"):
            assert getattr(rows, name).dtype == np.int32, name
        for name in ("positions", "slots", "parents", "sequences"):
            assert len(getattr(rows, name)) == count, name
        assert rows.tokens.min() >= 0
        assert rows.tokens.max() < self.vocab_size
        assert rows.positions.min() >= 0
        assert rows.positions.max() < self.context_limit
        assert rows.slots.max() < self.context_limit
        assert (np.diff(rows.wanted) > 0).all()
        for tables in (rows.tables, rows.tables if rows.window_tables is None else rows.window_tables):
            assert tables.shape == rows.tables.shape
            places = self._places(tables, rows.sequences, rows.slots)
            assert len(np.unique(places)) == count, "two rows write one slot"
        for row, parent in enumerate(rows.parents.tolist()):
            if parent == ROOT:
                assert rows.slots[row] == rows.positions[row]
            else:
                assert 0 <= parent < row
                assert rows.sequences[parent] == rows.sequences[row]
                assert rows.positions[row] == rows.positions[parent] + 1


def seen_slots(rows: Rows, row: int) -> Ids:
    """Where what a row sees lies, by position."""
    behind: list[int] = []
    while (parent := int(rows.parents[row])) != ROOT:
        behind.insert(0, int(rows.slots[row]))
        row = parent
    line: Ids = np.arange(int(rows.positions[row]) + 1, dtype=np.int32)
    return np.concatenate([line, np.asarray(behind, np.int32)]) if behind else line


def greedy(
    rule: Rule, prompt: Sequence[int], count: int, *, sight: int = 0, everywhere: bool = False
) -> list[int]:
    """Plain greedy decoding straight from the rule, without any engine: an independent oracle."""
    tokens = list(prompt)
    for _ in range(count):
        array = np.asarray(tokens, np.int32)
        stored = mix(array, np.arange(len(array)))
        history = stored.sum(keepdims=True, dtype=np.uint64)
        if sight:
            near = stored[-sight:].sum(keepdims=True, dtype=np.uint64)
            history = near if everywhere else history + np.uint64(3) * near
        logits = rule.logits(history, array[-1:], np.asarray([len(array) - 1], np.int32))
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]
