"""A head as recorded native operations: what it holds itself, and what it borrows from its target.

A head has two parts over one cache. Rows of the first start from the target's hidden states; rows of the
second from the state that the head itself made of the row before, which is how it drafts a second token.
Where there are several heads, one for each step, each has a part for the rows of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Protocol

import numpy as np

from paceline.core import ROOT, Floats, Ids, Output, Rows
from paceline.drafters.checkpoint import Checkpoint
from paceline.errors import ResourceError
from paceline.models.config import DecoderConfig
from paceline.models.decoder import Layers
from paceline.models.kv import padded
from paceline.models.memory import PAGE_SIZE, CacheNeeds, MemoryNeeds
from paceline.models.registry import architecture
from paceline.models.target import Lent
from paceline.models.tensors import Tensors
from paceline.native import Program

MAX_ROWS = 256
FROM_TARGET, FROM_ITSELF = 0, 1
"""The parts of a head, by where the states of their rows come from; later parts are like the second."""


class Lender(Protocol):
    """A target that shares its embedding and its output matrix; `models.NativeTarget` is one."""

    lent: Lent
    vocab_size: int
    context_limit: int
    pages: int
    threads: int
    isa: str


@dataclass(slots=True)
class Feed:
    """The rows of one request in a pass of a head.

    Attributes:
        table: [P] its pages.
        tokens, positions, slots, parents: [n] as in `core.Rows`, parents counted within the feed.
        states: [n, width] what the rows start from.
        wanted: rows whose logits are needed, ascending.
    """

    table: Ids
    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    parents: Sequence[int]
    states: Floats
    wanted: Sequence[int]


@dataclass(slots=True)
class Result:
    """What a pass of a head returns; arrays are overwritten by the next one.

    Attributes:
        argmax: [W] of the wanted rows, in the head's ids.
        logits: [W, vocab] in the head's ids.
        given: [W, width] the states that the wanted rows started from, once fused.
        made: [W, width] the states they lead to.
    """

    argmax: Ids
    logits: Floats
    given: Floats
    made: Floats


class HeadProgram:
    """Records a head, and runs passes of it.

    Args:
        lender: the target.
        threads: None means as many as the target has.
        output: name of the matrix that makes logits, if the head has its own.

    Attributes:
        layers: to record decoder layers with.
        embedded: buffer that `embed` fills.
        last: activations that the output matrix reads.
        width: of the states that it hands from row to row.
        cache: bytes that its cache takes; layers with a window keep everything too.
        parts: how many there are.
    """

    page_size = PAGE_SIZE
    max_rows = MAX_ROWS
    window = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        lender: Lender,
        *,
        threads: int | None = None,
        output: str = "output.weight",
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.lender = lender
        self.width = config.width
        self.context_limit = lender.context_limit + MAX_ROWS
        self.pages = lender.pages + 2 * MAX_ROWS // PAGE_SIZE
        self.cache = CacheNeeds.of(replace(config, windows=(0,) * config.layers), MAX_ROWS)
        self.program = _program(config, lender, threads or lender.threads, self.pages)
        self.tensors = Tensors(checkpoint, self.program)
        self.layers = Layers(self.program, self.tensors, config, lender.context_limit)
        self.embedded = self.program.buffer(config.width)
        self.last = self.program.acts(config.width, wanted=True)
        self.vocab_size = checkpoint.shape(output)[0] if checkpoint.has(output) else lender.vocab_size
        self._taps: list[int] = []
        self._heads: dict[str, int] = {}
        self._output = output
        self.parts = 1
        self._features: Floats = np.zeros((0, 0), np.float32)
        self._hidden: Floats = np.zeros((0, 0), np.float32)
        self._logits: Floats = np.zeros((0, self.vocab_size), np.float32)

    def embed(self, name: str = "token_embd.weight") -> None:
        """Record the look-up of the rows' tokens in the head's own embedding, or else the target's."""
        lent, vocab = self.lender.lent, self.lender.vocab_size
        scaled = architecture(lent.config.architecture).scaled_embedding
        scale = sqrt(self.width) if scaled else 1.0
        if self.checkpoint.has(name):
            self.tensors.embed(name, vocab, self.width, self.embedded, scale)
            return
        self.same_width("embedding")
        Tensors(lent.file, self.program).embed("token_embd.weight", vocab, self.width, self.embedded, scale)

    def same_width(self, what: str) -> None:
        """Refuse a head that borrows from a target of another width."""
        if self.width != (theirs := self.lender.lent.config.width):
            raise self.checkpoint.fault(
                f"it has no {what} of its own and is {self.width} wide, the target {theirs}",
                "it was made for another model",
            )

    def final_norm(self, source: int, out: int) -> None:
        """Record the target's own final norm."""
        lent = self.lender.lent
        self.program.float_norm(source, self.program.vector(lent.final_norm), lent.config.norm_eps, out)

    def output(self, name: str | None = None) -> None:
        """Record the logits of `last`: by the head's own matrix if it has one, else by the target's.

        Args:
            name: of that matrix, where there are several heads; None means the one of the constructor.
        """
        name = name or self._output
        if name not in self._heads:
            if self.checkpoint.has(name):
                self._heads[name] = self.tensors.matrix(name, self.vocab_size, self.width)
            else:
                self.same_width("output matrix")
                self._heads[name] = self.program.adopt(self.lender.lent.program, self.lender.lent.head)
        self.program.head(self.last, self._heads[name], self.lender.lent.config.logit_cap)

    def hand_out(self, buffer: int) -> None:
        """Record that this buffer's rows are part of the result: first what is given, then what is made."""
        self._taps.append(self.program.tap(buffer))

    def next_part(self) -> int:
        """Begin another part; returns its number."""
        part = self.program.part()
        self.layers.turn()
        self.parts = part + 1
        return part

    def seal(self) -> None:
        """End the recording."""
        self.tensors.refuse_leftovers()
        self.program.listen(self._taps)
        self._features = np.zeros((MAX_ROWS, self.program.feature_width), np.float32)
        self._hidden = np.zeros((MAX_ROWS, self.program.hidden_width), np.float32)

    @property
    def needs(self) -> MemoryNeeds:
        """What it would take; of a head for the outline of a target only."""
        own = (self._features, self._hidden, self._logits)
        return MemoryNeeds.of(self.program, self.cache, sum(array.nbytes for array in own))

    def run(self, feeds: Sequence[Feed], part: int) -> Result:
        """Run one pass over the rows of several requests, at most `max_rows` together."""
        count, rows = 0, _lay(feeds)
        for feed in feeds:
            end = count + len(feed.tokens)
            self._features[count:end, : feed.states.shape[1]] = feed.states
            count = end
        return self._pass(rows, part)

    def forward(self, rows: Rows) -> Output:
        """A pass over rows without states, as `PassTime` measures it."""
        result = self._pass(rows, FROM_ITSELF)
        return Output(result.argmax, result.logits)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a whole cache page."""
        self.program.copy_page(source, target)

    def _pass(self, rows: Rows, part: int) -> Result:
        count, wanted = len(rows.tokens), len(rows.wanted)
        if len(self._logits) < wanted:
            self._logits = np.empty((wanted, self.vocab_size), np.float32)
        argmax: Ids = np.empty(wanted, np.int32)
        hidden = self._hidden[:count] if wanted else None
        self.program.run(
            rows.tokens,
            rows.positions,
            rows.slots,
            rows.parents,
            rows.sequences,
            rows.tables,
            rows.wanted,
            argmax,
            self._logits if wanted else None,
            hidden,
            self._features[:count],
            part=part,
        )
        if wanted and argmax.min() < 0:
            raise ResourceError("the head's numbers overflow: no logit is a number", "use dtype=f32")
        start, width = 2 * part * self.width, self.width
        states = self._hidden[rows.wanted, start : start + 2 * width]
        return Result(argmax, self._logits[:wanted], states[:, :width], states[:, width:])


def _program(config: DecoderConfig, lender: Lender, threads: int, pages: int) -> Program:
    try:
        return type(lender.lent.program)(  # for the outline of a target, a tally too
            threads=threads,
            isa=lender.isa,
            max_rows=MAX_ROWS,
            page_size=PAGE_SIZE,
            pages=pages,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
    except (RuntimeError, MemoryError) as error:
        raise ResourceError(
            f"the head cannot be set up: {error}", "lower threads or max_model_len"
        ) from error


def _lay(feeds: Sequence[Feed]) -> Rows:
    """The rows of all feeds, one after the other."""
    if len(feeds) == 1:
        (feed,) = feeds
        return Rows(
            tokens=_ints(feed.tokens),
            positions=_ints(feed.positions),
            slots=_ints(feed.slots),
            parents=_ints(feed.parents),
            sequences=np.zeros(len(feed.tokens), np.int32),
            tables=feed.table[None],
            wanted=_ints(feed.wanted),
            logits=True,
        )
    counts = [len(feed.tokens) for feed in feeds]
    firsts = np.cumsum([0, *counts[:-1]])
    parents = [
        parent if parent == ROOT else parent + int(first)
        for feed, first in zip(feeds, firsts, strict=True)
        for parent in feed.parents
    ]
    wanted = [int(first) + row for feed, first in zip(feeds, firsts, strict=True) for row in feed.wanted]
    return Rows(
        tokens=_ints([token for feed in feeds for token in feed.tokens]),
        positions=_ints([position for feed in feeds for position in feed.positions]),
        slots=_ints([slot for feed in feeds for slot in feed.slots]),
        parents=_ints(parents),
        sequences=np.repeat(np.arange(len(feeds), dtype=np.int32), counts),
        tables=padded([feed.table for feed in feeds]),
        wanted=_ints(wanted),
        logits=True,
    )


def _ints(values: Sequence[int]) -> Ids:
    return np.asarray(values, np.int32)
