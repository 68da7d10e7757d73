"""The middle of a step: drafts become rows of one pass, and what the pass returns becomes text.

Plain decoding is a draft of no nodes and goes the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.core import ROOT, Draft, Floats, Ids, Outcome, Output, Rows, Target
from paceline.engine.counters import Counters, record
from paceline.engine.request import Request
from paceline.models.kv import KVCache, KVSequence, tables
from paceline.sampling.verify import walk


@dataclass(slots=True)
class Work:
    """One request's share of a pass.

    Attributes:
        chunk: committed tokens to compute: 1 while decoding, more during prefill.
        draft: guesses behind them.
        wanted: whether the chunk reaches the end of the committed text, so that sampling follows.
        slots: where each draft node's KV went; filled in with the rows.
    """

    request: Request
    sequence: KVSequence
    chunk: int
    draft: Draft
    wanted: bool
    decode: bool
    slots: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.chunk + len(self.draft)

    @property
    def outputs(self) -> int:
        return 1 + len(self.draft) if self.wanted else 0


class RowBuilder:
    """Lays the rows of a pass out in arrays that are kept from pass to pass.

    Args:
        max_rows: most rows of a pass.
        context_limit: most slots of a sequence.
    """

    def __init__(self, max_rows: int, context_limit: int) -> None:
        self._tokens: Ids = np.zeros(max_rows, np.int32)
        self._positions: Ids = np.zeros(max_rows, np.int32)
        self._slots: Ids = np.zeros(max_rows, np.int32)
        self._parents: Ids = np.zeros(max_rows, np.int32)
        self._sequences: Ids = np.zeros(max_rows, np.int32)
        self._wanted: Ids = np.zeros(max_rows, np.int32)
        self._count: Ids = np.arange(max(max_rows, context_limit), dtype=np.int32)
        self._chains = [list(range(-1, n - 1)) for n in range(max_rows + 1)]

    def build(self, works: Sequence[Work]) -> Rows:
        """Rows of all works in order; views that the next build overwrites."""
        row = output = 0
        for index, work in enumerate(works):
            self._lay(work, index, row)
            if work.outputs:
                first = row + work.chunk - 1
                self._wanted[output : output + work.outputs] = self._count[first : first + work.outputs]
                output += work.outputs
            row += work.rows
        pages, window_pages = tables([work.sequence for work in works])
        return Rows(
            self._tokens[:row],
            self._positions[:row],
            self._slots[:row],
            self._parents[:row],
            self._sequences[:row],
            pages,
            self._wanted[:output],
            any(work.wanted and work.request.sampler.needs_logits for work in works),
            window_pages,
        )

    def _lay(self, work: Work, index: int, row: int) -> None:
        base, middle, end = len(work.sequence), row + work.chunk, row + work.rows
        self._tokens[row:middle] = work.request.context.tokens[base : base + work.chunk]
        self._tokens[middle:end] = work.draft.tokens
        self._positions[row:end] = self._count[base : base + work.rows]
        self._slots[row:end] = self._count[base : base + work.rows]
        self._parents[row:end] = ROOT
        self._sequences[row:end] = index
        parents = work.draft.parents
        if parents != self._chains[len(parents)]:
            self._lay_tree(work, parents, middle, base + work.chunk)

    def _lay_tree(self, work: Work, parents: list[int], row: int, base: int) -> None:
        """Nodes that lead straight on from the root lie where their position says, like plain text; the
        others go behind them."""
        depths = [0] * len(parents)
        tip, line = ROOT, []
        for node, parent in enumerate(parents):
            depths[node] = 0 if parent == ROOT else depths[parent] + 1
            if parent == tip:
                tip = node
                line.append(node)
        work.slots = [0] * len(parents)
        on_line, aside = set(line), base + len(line)
        for node, parent in enumerate(parents):
            at = row + node
            self._positions[at] = base + depths[node]
            if node in on_line:
                work.slots[node] = base + depths[node]
            else:
                work.slots[node] = aside
                aside += 1
                self._parents[at] = row + parent if parent != ROOT else row - 1
            self._slots[at] = work.slots[node]


class Share(NamedTuple):
    """One work's part of what a pass returned.

    Attributes:
        argmax: [outputs]
        logits: [outputs, vocab], or None if the pass did not compute them.
        hidden: [rows, width] by layer, of the layers that the target listens at.
    """

    argmax: Ids
    logits: Floats | None
    hidden: Mapping[int, Floats]


def commit(work: Work, share: Share, target: Target, cache: KVCache, counters: Counters) -> None:
    """Move one request forward by what the pass decided: text, KV and statistics together."""
    request, sequence = work.request, work.sequence
    base, placed = len(sequence), work.chunk
    outcome = None
    if work.wanted:
        outcome = _sample(work, share.argmax, share.logits)
        _compact(work, outcome.path, target)
        placed += len(outcome.path)
        counters.generated_tokens += len(outcome.committed)
        if work.decode:
            record(request.stats, counters.speculation, outcome)
    cache.commit(sequence, request.context.tokens[base : base + placed])
    if request.planner.layers:
        path = outcome.path if outcome else ()
        request.planner.hear(request.context, base, _kept(work, share.hidden, placed, path))
    request.planner.commit(request.context, outcome if len(work.draft) else None)


def _kept(work: Work, hidden: Mapping[int, Floats], placed: int, path: Sequence[int]) -> Mapping[int, Floats]:
    """The states of the `placed` rows that became text."""
    if placed == work.rows:
        return hidden
    kept: Any = slice(placed)
    if path and path[-1] >= len(path):  # not the first nodes
        kept = [*range(work.chunk), *(work.chunk + node for node in path)]
    return {layer: states[kept] for layer, states in hidden.items()}


def _sample(work: Work, argmax: Ids, logits: Floats | None) -> Outcome:
    """Walk the draft, token by token, until it disagrees or the text ends."""
    request, draft = work.request, work.draft
    first = len(request.context.tokens)
    path: list[int] = []
    row = 0
    for token, node in walk(draft, request.sampler, argmax, logits, first):
        logprob = None
        if request.logprobs is not None:
            assert logits is not None
            logprob = request.sampler.logprobs(logits[row], token)
        if node != ROOT:
            path.append(node)
        row = 1 + node
        if request.take(token, "" if node == ROOT else draft.sources[node], logprob):
            break
    return Outcome(draft, tuple(path), tuple(request.context.tokens[first:]))


def _compact(work: Work, path: Sequence[int], target: Target) -> None:
    """Bring the KV of an accepted path into consecutive slots."""
    if not work.slots:
        return
    start = len(work.sequence) + work.chunk
    moves = [(work.slots[node], start + i) for i, node in enumerate(path) if work.slots[node] != start + i]
    if moves:
        sources, targets = zip(*moves, strict=True)
        target.move(work.sequence.table, sources, targets, work.sequence.window_table)


def shares(works: Sequence[Work], output: Output) -> list[Share]:
    """Part a pass's output by work."""
    parts: list[Share] = []
    start = row = 0
    for work in works:
        end, rows = start + work.outputs, slice(row, row + work.rows)
        logits = None if output.logits is None else output.logits[start:end]
        hidden = {layer: states[rows] for layer, states in output.hidden.items()}
        parts.append(Share(output.argmax[start:end], logits, hidden))
        start, row = end, rows.stop
    return parts
