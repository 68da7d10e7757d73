"""Block drafters: a small network fills a block of masks in one pass (DFlash, arXiv 2602.06036).

It reads what the target made of every token of the text but the last, which is the block's anchor. What a
draft costs is known before it is made, and hardly grows with its length; how far a draft is worth checking
is then a matter of its chances. With the heads of `dspark` the tokens are chosen one by one, each with a
view of the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from paceline.core import ROOT, Context, Floats, Prices, Target
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.dflash_config import read_config
from paceline.drafters.dflash_model import MAX_ROWS, Block, BlockModel
from paceline.drafters.dspark import Chain, ChainHeads
from paceline.drafters.head_loading import HeadOptions, lender_of
from paceline.drafters.hearing import HeadSeat, StateDrafter
from paceline.drafters.loading import Host
from paceline.drafters.network import Costs, Growth
from paceline.drafters.offer import Offer
from paceline.drafters.outlook import Hope, Outlook
from paceline.errors import PacelineError, RequestError
from paceline.sampling.sampler import Sampler

_WAITING = 64
"""States that wait before they are filed without being asked for: many rows in a pass cost little each."""

_SURE = 2  # added to the kind of a guess whose chance a confidence head told
_RATE = 0.1


def load(found: Checkpoint, host: Host, options: HeadOptions) -> BlockDrafter:
    """Make a drafter of a DFlash or DSpark checkpoint.

    Raises:
        ModelFileError: it is damaged, incomplete, or was made for another target.
        UnsupportedModelError: it asks for something that does not run here.
    """
    lender = lender_of(host)
    config = read_config(
        found, layers=lender.lent.config.layers, sample_from_anchor=options.sample_from_anchor
    )
    if options.layers is not None:
        config = replace(config, taps=options.layers)
    model = BlockModel(found, config, lender)
    costs = host.measure(cast(Target, model))  # as much of a target as timing takes
    return BlockDrafter(found.kind, model, ChainHeads(found, config), host.tokenizer.eog_ids, costs)


class BlockOutlook(Outlook):
    """Prices of one step with blocks in it.

    Args:
        prices: of the target's pass.
        block: seconds of a pass over so many blocks.
        filing: seconds to file one row.
        step: seconds to choose one more token for so many drafts.
    """

    def __init__(
        self, prices: Prices, block: Callable[[int], float], filing: float, step: Callable[[int], float]
    ) -> None:
        super().__init__(prices, step)
        self._block = block
        self._filing = filing

    def _forecast(self, hopes: Sequence[Hope]) -> float:
        """Tokens per second of the best step with a block for each of these."""
        spent = self._block(len(hopes)) + self._filing * sum(hope.rows for hope in hopes)
        best, nodes, tokens = 0.0, 0, self._prices.tokens
        reach = [1.0] * len(hopes)
        for depth in range(1, max(hope.budget for hope in hopes) + 1):
            going = [i for i, hope in enumerate(hopes) if hope.budget >= depth]
            nodes += len(going)
            if nodes > self._most:
                break
            for i in going:
                reach[i] *= hopes[i].chance
                tokens += reach[i]
            spent += self._cost(len(going))
            best = max(best, tokens / (spent + self._row(nodes)))
        return best


_Growth = Growth[HeadSeat]


@dataclass(slots=True)
class _Line:
    """A draft under way: one chain.

    Attributes:
        logits: [slots, rows] of the block.
        tip: the node that the next guess follows.
        reach: chance of the tip to be reached and taken.
    """

    growth: _Growth
    sampler: Sampler
    logits: Floats
    chain: Chain
    tip: int = ROOT
    reach: float = 1.0
    depth: int = 0
    done: bool = False


class BlockDrafter(StateDrafter[_Growth]):
    """Drafts with blocks; implements `core.HearingDrafter` and `core.CostlyDrafter`.

    Args:
        name: of the drafter.
        model: the network.
        heads: what chooses its tokens.
        ends: the target's end tokens.
        costs: pass times of the network, by rows.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        model: BlockModel,
        heads: ChainHeads,
        ends: frozenset[int],
        costs: Costs,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self._heads = heads
        self._per_row = self._per_token = 0.0  # seconds per row, per token
        super().__init__(name, model, model.config.taps, model.places, ends, costs, clock=clock)

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        super().hear(context, start, hidden)
        seat = self._seats.get(context.request)
        if self.broken is not None or seat is None or seat.track.waiting.length < _WAITING:
            return
        try:
            if self.cache.open(seat.track, context.tokens, 0):
                self._file(context, seat)
        except PacelineError as error:
            self._break(error)

    def price(self, context: Context) -> float:  # noqa: ARG002
        return self.costs.cost(self.model.config.block)

    def _outlook(self, prices: Prices) -> Outlook:
        size = self.model.config.block
        return BlockOutlook(
            prices, lambda n: self.costs.cost(n * size), self._per_row, lambda n: n * self._per_token
        )

    def _begin(self, context: Context, budget: int) -> _Growth | None:
        seat = self._seats.get(context.request)
        if budget <= 0 or seat is None or self._known(seat) != len(context.tokens) - 1:
            return None
        self._follow(seat, context)
        seat.offer = Offer()
        return Growth(seat, context, context.tokens, min(budget, self.model.config.slots))

    def _room(self, growth: _Growth) -> int:  # noqa: ARG002
        return self.model.config.block

    def _known(self, seat: HeadSeat) -> int:
        """Rows whose states are known or in place."""
        track = seat.track
        waiting = track.waiting.end if track.waiting.length else 0
        return max(waiting, track.done if track.sequence is not None else 0)

    def _grow(self, going: list[_Growth], outlook: Outlook | None) -> None:
        most = MAX_ROWS // self.model.config.block
        for first in range(0, len(going), most):
            lines = self._speak(going[first : first + most], outlook)
            while lines:
                self._write(lines, outlook)
                lines = [line for line in lines if not line.done]
                if outlook is not None:
                    chosen = outlook.onward([line.reach * line.growth.seat.hope for line in lines])
                    lines = [lines[i] for i in chosen]

    def _speak(self, growths: Sequence[_Growth], outlook: Outlook | None) -> list[_Line]:
        """Run the blocks of these requests."""
        blocks = [self._block(growth) for growth in growths]
        start = self._clock()
        logits, hidden = self.model.speak(blocks)
        for growth in growths:
            assert growth.seat.track.sequence is not None
            self.cache.kv.rollback(growth.seat.track.sequence)
        self._spend(len(blocks) * self.model.config.block, self._clock() - start, outlook)
        return [
            _Line(growth, growth.seat.sampler.ahead(), rows, self._heads.open(states, block.anchor))
            for growth, block, rows, states in zip(growths, blocks, logits, hidden, strict=True)
        ]

    def _block(self, growth: _Growth) -> Block:
        """File what is missing, and make room for the block behind it."""
        self._file(growth.context, growth.seat)
        track = growth.seat.track
        assert track.sequence is not None
        seated = self.cache.kv.reserve(track.sequence, self.model.config.block)
        assert seated, "room that was made is gone"
        start = track.done - track.base
        near = track.sequence.window_table
        return Block(
            growth.context.tokens[-1],
            start,
            track.sequence.table.copy(),
            growth.left,
            None if near is None else near.copy(),
        )

    def _file(self, context: Context, seat: HeadSeat) -> None:
        """Compute keys and values of the states that wait; room must have been made."""
        track = seat.track
        assert track.sequence is not None
        states = track.waiting.all()[max(0, track.done - track.waiting.first) :]
        if not track.waiting.length or not len(states):
            return
        start = self._clock()
        sequence = track.sequence
        self.model.file(states, track.done - track.base, sequence.table, sequence.window_table)
        self.cache.keep(track, context.tokens, len(states))
        track.waiting.drop(track.waiting.length)
        self._per_row = _mean(self._per_row, (self._clock() - start) / len(states))

    def _write(self, lines: Sequence[_Line], outlook: Outlook | None) -> None:
        """Choose one more token for each."""
        start = self._clock()
        biases = None
        if self._heads.markov is not None:
            biases = self.model.bias(np.stack([line.chain.latent() for line in lines]))
        for i, line in enumerate(lines):
            row = line.logits[line.depth]
            if biases is not None:
                row = row + biases[i]
            self._extend(line, row, outlook)
        seconds = self._clock() - start
        self._per_token = _mean(self._per_token, seconds / len(lines))
        if outlook is not None:
            outlook.spent += seconds

    def _extend(self, line: _Line, logits: Floats, outlook: Outlook | None) -> None:
        """Write the next token of one draft."""
        growth, seat = line.growth, line.growth.seat
        position = len(growth.context.tokens) + line.depth
        try:
            own, probability = self._choices.pick(logits, line.sampler, position)
        except RequestError:  # the target will say so, if it comes to the same
            line.done = True
            return
        token = self._target_ids[own]
        sure, kind = line.chain.sure(), int(not growth.context.params.greedy)
        if sure is not None:
            probability, kind = sure, kind + _SURE
        features = self.calibration.features(kind, probability, line.depth)
        chance = self.calibration.chance(features, seat.luck.log_odds)
        seat.offer.guesses[line.tip] = [(token, chance, features)]
        line.tip = seat.offer.add(line.tip, token, chance)
        line.reach *= chance
        self._learn_hope(seat, chance)
        if outlook is not None:
            outlook.add(line.reach)
        line.sampler.advance(token)
        line.chain.follow(token)
        line.depth += 1
        ends = token in self._ends and not growth.context.params.ignore_eos
        line.done = line.depth >= growth.left or ends


def _mean(mean: float, seconds: float) -> float:
    """A running mean that begins with the first value."""
    return seconds if mean == 0.0 else mean + _RATE * (seconds - mean)
