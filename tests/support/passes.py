"""Builds the rows of a pass by hand, for tests of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import ROOT, Floats, Ids, Output, Rows, Target


class Pass:
    """Collects rows over any number of sequences, then runs them.

    Args:
        tables: page ids of each sequence.
        windows: page ids for layers with a window; None means the same, so that nothing is given back.
    """

    def __init__(
        self,
        target: Target,
        tables: Sequence[Sequence[int]],
        windows: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._target = target
        self._tables = _padded(tables)
        self._windows = None if windows is None else _padded(windows)
        self._rows: list[tuple[int, int, int, int, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def node(
        self, token: int, position: int, *, slot: int | None = None, parent: int = ROOT, sequence: int = 0
    ) -> int:
        """Add one row; returns its index."""
        self._rows.append((token, position, position if slot is None else slot, parent, sequence))
        return len(self._rows) - 1

    def chain(self, tokens: Sequence[int], start: int, *, sequence: int = 0) -> list[int]:
        """Add successive tokens of a sequence from position `start` on; returns their row indices."""
        return [self.node(token, start + i, sequence=sequence) for i, token in enumerate(tokens)]

    def rows(self, wanted: Sequence[int] | None = None, *, logits: bool = True) -> Rows:
        columns: NDArray[Any] = np.asarray(self._rows, np.int32).T.copy()
        tokens, positions, slots, parents, sequences = columns
        chosen = np.arange(len(self._rows)) if wanted is None else np.asarray(wanted)
        wanted_rows: Ids = chosen.astype(np.int32)
        return Rows(
            tokens, positions, slots, parents, sequences, self._tables, wanted_rows, logits, self._windows
        )

    def run(self, wanted: Sequence[int] | None = None, *, logits: bool = True) -> Output:
        """Run the pass; `wanted` None means all rows. The output is a copy that lasts."""
        output = self._target.forward(self.rows(wanted, logits=logits))
        kept = None if output.logits is None else output.logits.copy()
        return Output(output.argmax.copy(), kept)

    def logits(self, wanted: Sequence[int] | None = None) -> Floats:
        logits = self.run(wanted).logits
        assert logits is not None
        return logits


def _padded(tables: Sequence[Sequence[int]]) -> Ids:
    padded = np.zeros((len(tables), max(len(table) for table in tables)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def table_of(target: Target, *, first: int = 0, count: int | None = None) -> list[int]:
    """Consecutive pages for one sequence; None means all pages from `first` on."""
    return list(range(first, target.pages if count is None else first + count))


def run_in_chunks(
    target: Target,
    tokens: Sequence[int],
    chunks: Sequence[int],
    table: Sequence[int],
    *,
    start: int = 0,
    windows: Sequence[int] | None = None,
) -> Floats:
    """Logits [n, vocab] of all tokens, run in passes of these sizes (the last repeats)."""
    parts: list[Floats] = []
    at, turn = 0, 0
    while at < len(tokens):
        size = chunks[min(turn, len(chunks) - 1)]
        one = Pass(target, [table], None if windows is None else [windows])
        one.chain(tokens[at : at + size], start + at)
        parts.append(one.logits())
        at, turn = at + size, turn + 1
    return np.concatenate(parts)


def random_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    ids: Ids = np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)
    return [int(i) for i in ids]


def greedy(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    """Plain greedy decoding, a prefill and then row by row."""
    table = table_of(target)
    first = Pass(target, [table])
    first.chain(prompt, 0)
    text = [*prompt, int(first.run([len(prompt) - 1], logits=False).argmax[0])]
    while len(text) < len(prompt) + count:
        one = Pass(target, [table])
        one.chain(text[-1:], len(text) - 1)
        text.append(int(one.run(logits=False).argmax[0]))
    return text[len(prompt) :]
