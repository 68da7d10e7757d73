"""A block drafter's network over native kernels: keys and values from the target's states, blocks of masks.

    c = norm(fc(states side by side))                       per text position
    keys and values of every layer = projections of c       filed once, kept
    x = embedding of [anchor, MASK, ...]                    one pass, forgotten afterwards
    per layer:  x += attention(x over c's and the block's own)     then  x += feed-forward(x)
    logits = head(norm(x))

The weights of the projections serve both: what is filed and the block's own keys and values differ in their
input alone (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from paceline.core import ROOT, Floats, Ids, Output, Rows
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.checkpoint_ids import target_ids
from paceline.drafters.dflash_config import BlockConfig
from paceline.drafters.dspark import weight_bytes
from paceline.drafters.head_program import Lender
from paceline.drafters.suitability import Facts, check_block
from paceline.errors import ModelFileError
from paceline.models.decoder import Layers
from paceline.models.kv import padded
from paceline.models.memory import PAGE_SIZE, CacheNeeds, MemoryNeeds
from paceline.models.registry import architecture
from paceline.models.target import Lent, window_of
from paceline.models.tensors import Tensors

MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class Block:
    """One request's block in a pass.

    Attributes:
        anchor: the last token of the text.
        start: rows filed so far: where the anchor stands.
        table: [P] pages; they cover the block too.
        slots: how many of its predictions are wanted.
        window_table: [P] pages of layers with a window; None where none has one, or `table` serves all.
    """

    anchor: int
    start: int
    table: Ids
    slots: int
    window_table: Ids | None = None


class BlockModel:
    """Runs a block drafter; has of `core.Target` what measuring its passes takes.

    Attributes:
        config: sizes and conventions.
        places: [V_d] the target's ids of a reduced vocabulary, ascending; None where ids are the same.
        vocab_size: of the target.
        cache: bytes that its cache takes.
    """

    page_size = PAGE_SIZE
    max_rows = MAX_ROWS

    def __init__(self, found: Checkpoint, config: BlockConfig, lender: Lender) -> None:
        lent = lender.lent
        self.checkpoint = found
        self.config = config
        self.lender = lender
        self.context_limit = lender.context_limit + MAX_ROWS
        self.pages = lender.pages + 2 * MAX_ROWS // PAGE_SIZE
        check_block(found, config, Facts.of(lender), config.taps)
        self.vocab_size = lender.vocab_size
        self._states = len(config.taps) * lent.config.width
        self.rows = found.shape("output.weight")[0] if found.has("output.weight") else self.vocab_size
        self.places = target_ids(found, self.rows, self.vocab_size) if self.rows != self.vocab_size else None
        self.cache = CacheNeeds.of(config.decoder, MAX_ROWS)
        self._program = type(lent.program)(  # for the outline of a target, a tally too
            threads=lender.threads,
            isa=lender.isa,
            max_rows=MAX_ROWS,
            page_size=PAGE_SIZE,
            pages=self.pages,
            layers=config.decoder.layers,
            heads=config.decoder.heads,
            kv_heads=config.decoder.kv_heads,
            head_dim=config.decoder.head_dim,
            windowed=[window > 0 for window in config.decoder.windows],
            window_pages=self.pages if max(config.decoder.windows) else 0,
        )
        self.window = window_of(self._program, max(config.decoder.windows), self.pages, MAX_ROWS)
        self._tensors = Tensors(found, self._program)
        self._record(found, lent, lender.context_limit)
        self.weight_bytes: int = self._program.weight_bytes
        self._logits: Floats = np.empty((0, self.rows), np.float32)
        self._biases: Floats = np.empty((1 if config.markov else 0, self.rows), np.float32)

    @property
    def needs(self) -> MemoryNeeds:
        """What it would take, with what chooses its tokens; of one for the outline of a target only."""
        own = self._logits.nbytes + self._biases.nbytes + weight_bytes(self.checkpoint)
        return MemoryNeeds.of(self._program, self.cache, own)

    def file(self, features: Floats, start: int, table: Ids, window_table: Ids | None = None) -> None:
        """Compute and keep keys and values.

        Args:
            features: [n, taps * width] the target's states, side by side.
            start: where the first stands.
        """
        for at in range(0, len(features), MAX_ROWS):
            some = features[at : at + MAX_ROWS]
            places: Ids = np.arange(start + at, start + at + len(some), dtype=np.int32)
            rows = _rows(np.zeros(len(some), np.int32), places, [len(some)], [(table, window_table)])
            self._run(rows, self._filing, features=some)

    def speak(self, blocks: Sequence[Block]) -> tuple[list[Floats], list[Floats]]:
        """Run the blocks, as many as fit `max_rows`, in one pass.

        Returns:
            For each block [slots, rows] logits, valid until the next call, and [first + slots, width] the
            states from the anchor's on, which are none unless there is a Markov or confidence head.
        """
        size, first = self.config.block, self.config.first
        tokens: Ids = np.full((len(blocks), size), self.config.mask, np.int32)
        tokens[:, 0] = [block.anchor for block in blocks]
        starts: Ids = np.array([block.start for block in blocks], np.int32)
        places: Ids = np.add.outer(starts, np.arange(size, dtype=np.int32))
        rows = _rows(
            tokens.reshape(-1),
            places.reshape(-1),
            [size] * len(blocks),
            [(block.table, block.window_table) for block in blocks],
        )
        counts = [block.slots for block in blocks]
        rows.wanted = np.concatenate(
            [np.arange(n, dtype=np.int32) + np.int32(i * size + first) for i, n in enumerate(counts)]
        )
        reach = np.repeat(places[:, -1] + np.int32(1), size)
        logits, hidden = self._pass(rows, reach)
        states = [hidden[i * size : i * size + first + n] for i, n in enumerate(counts)]
        return np.split(logits, np.cumsum(counts)[:-1]), states

    def bias(self, latents: Floats) -> Floats:
        """[n, rows] what a Markov head adds to logits for latents [n, rank]; valid until the next call."""
        count = len(latents)
        features = np.zeros((count, self._program.feature_width), np.float32)
        features[:, : latents.shape[1]] = latents
        nothing: Ids = np.zeros(count, np.int32)
        rows = _rows(nothing, nothing, [count], [(np.zeros(1, np.int32), None)])
        rows.wanted = np.arange(count, dtype=np.int32)
        if len(self._biases) < count:
            self._biases = np.empty((count, self.rows), np.float32)
        self._run(rows, self._biasing, logits=self._biases, features=features)
        return self._biases[:count]

    def forward(self, rows: Rows) -> Output:
        """Run rows as those of blocks, to see how long that takes."""
        logits, _ = self._pass(rows, None)
        return Output(np.zeros(len(logits), np.int32), None)

    def copy_page(self, source: int, target: int) -> None:
        self._program.copy_page(source, target)

    def _record(self, found: Checkpoint, lent: Lent, context: int) -> None:
        config, program, tensors = self.config, self._program, self._tensors
        layers = Layers(program, tensors, config.decoder, context)
        own = Tensors(lent.file, program)
        scale = (
            math.sqrt(lent.config.width) if architecture(lent.config.architecture).scaled_embedding else 1.0
        )
        source = tensors if found.has("token_embd.weight") else own
        source.embed("token_embd.weight", self.vocab_size, config.decoder.width, layers.x, scale)
        # Who sees whom is told per pass, so layers that differ in it run as parts.
        self._parts: list[tuple[int, bool]] = []
        for causal, some in groupby(range(config.decoder.layers), key=lambda layer: config.causal[layer]):
            if self._parts:
                self._parts.append((program.part(), causal))
                layers.turn()
            else:
                self._parts.append((0, causal))
            for layer in some:
                layers.attention(layer)
                layers.feed_forward(layer)
        self._record_head(found, lent, layers)
        self._record_filing(layers)
        if config.markov is not None:
            self._record_bias(config.markov.rank)
        tensors.refuse_leftovers(besides=("markov_head.", "confidence_head."))

    def _record_head(self, found: Checkpoint, lent: Lent, layers: Layers) -> None:
        config, program, tensors = self.config, self._program, self._tensors
        width, cap = config.decoder.width, config.decoder.logit_cap
        last = program.acts(width, wanted=True)
        if config.markov is None and not config.confidence:
            layers.norm("output_norm", last)
        else:
            normed = program.buffer(width)
            gamma = tensors.vector("output_norm.weight", width)
            program.float_norm(layers.x, gamma, config.decoder.norm_eps, normed)
            program.listen([program.tap(normed)])
            program.quantize(normed, last)
        if found.has("output.weight"):
            matrix = tensors.matrix("output.weight", self.rows, width)
        else:
            matrix, cap = program.adopt(lent.program, lent.head), cap or lent.config.logit_cap
        program.head(last, matrix, cap)

    def _record_filing(self, layers: Layers) -> None:
        config, program, tensors = self.config, self._program, self._tensors
        width, eps = config.decoder.width, config.decoder.norm_eps
        self._filing = program.part()
        layers.turn()
        states = program.buffer(self._states)
        program.feed(states)
        taken = program.acts(self._states)
        program.quantize(states, taken)
        program.linear(taken, [tensors.matrix("fc.weight", width, self._states)], [-1], [layers.x])
        program.norm(layers.x, tensors.vector("hidden_norm.weight", width), eps, layers.normed)
        for layer in range(config.decoder.layers):
            layers.file(layer, layers.normed, width)

    def _record_bias(self, rank: int) -> None:
        program = self._program
        self._biasing = program.part()
        latent, taken = program.buffer(rank), program.acts(rank, wanted=True)
        program.feed(latent)
        program.quantize(latent, taken)
        program.head(taken, self._tensors.matrix("markov_head.markov_w2.weight", self.rows, rank))

    def _pass(self, rows: Rows, reach: Ids | None) -> tuple[Floats, Floats]:
        """Logits of the wanted rows, and [R, width] what came before the head where somebody listens."""
        count = len(rows.wanted)
        if len(self._logits) < count:
            self._logits = np.empty((count, self.rows), np.float32)
        hidden = np.empty((len(rows.tokens), self._program.hidden_width), np.float32)
        for part, causal in self._parts:
            last = part == self._parts[-1][0]
            self._run(
                rows,
                part,
                logits=self._logits if last else None,
                hidden=hidden if last and hidden.shape[1] else None,
                reach=None if causal else reach,
            )
        return self._logits[:count], hidden if hidden.shape[1] else hidden[:0]

    def _run(
        self,
        rows: Rows,
        part: int,
        *,
        logits: Floats | None = None,
        hidden: Floats | None = None,
        features: Floats | None = None,
        reach: Ids | None = None,
    ) -> None:
        best: Ids = np.zeros(len(rows.wanted), np.int32)
        self._program.run(
            rows.tokens,
            rows.positions,
            rows.slots,
            rows.parents,
            rows.sequences,
            rows.tables,
            rows.wanted,
            best,
            logits,
            hidden,
            features,
            reach,
            part,
            rows.window_tables,
        )
        if len(best) and best.min() < 0:
            raise ModelFileError("its numbers overflow: no logit is a number", "its weights are damaged")


def _rows(tokens: Ids, places: Ids, counts: Sequence[int], tables: Sequence[tuple[Ids, Ids | None]]) -> Rows:
    """Rows of one sequence after the other, each in its own place; none is wanted yet."""
    windows = [near for _, near in tables if near is not None]
    return Rows(
        tokens=tokens,
        positions=places,
        slots=places.copy(),
        parents=np.full(len(tokens), ROOT, np.int32),
        sequences=np.repeat(np.arange(len(tables), dtype=np.int32), counts),
        tables=padded([table for table, _ in tables]),
        wanted=np.zeros(0, np.int32),
        logits=True,
        window_tables=padded(windows) if windows else None,
    )
