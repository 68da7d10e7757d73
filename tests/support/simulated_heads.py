"""Heads in simulated time: what they say is given, and what their passes cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.drafters.dflash import BlockDrafter
from paceline.drafters.dflash_model import Block
from paceline.drafters.head import HeadDrafter
from paceline.drafters.head_program import Feed, Result
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from support.simulated_drafting import Clock, Guessing, Simulation
from support.tiny_tokenizer import VOCAB_SIZE

Chance = Callable[[int], float]

TARGET = {1: 10.7e-3, 2: 11.4e-3, 4: 11.6e-3, 8: 13.9e-3, 16: 24e-3}
"""Seconds of a pass of a 0.5B model on two cores, by rows."""


class Opinions(Guessing):
    """What a head says of a text: its first, second, ... choice is right with the chance given for the place.

    Args:
        chances: of each choice, by place.
        claims: how likely the head holds each choice in all; honest unless given.
    """

    def __init__(
        self,
        text: Sequence[int],
        chances: Sequence[Chance],
        claims: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(text, chances[0], seed)
        self._chances, self._claims = chances, claims

    def row(self, place: int) -> Any:
        """[vocab] logits of the token that stands there."""
        at = min(place, len(self._text) - 1)
        chances = [chance(at) for chance in self._chances]
        claims = chances if self._claims is None else self._claims
        rank = int(np.searchsorted(np.cumsum(chances), self._luck[at], side="right"))
        others = range(at, at + len(chances) + 1)
        row = np.full(VOCAB_SIZE, np.log((1.0 - sum(claims)) / (VOCAB_SIZE - len(claims))), np.float32)
        for n, claim in enumerate(claims):
            token = self._text[at] if n == rank else (self._text[at] + 1 + others[n]) % VOCAB_SIZE
            row[token] = np.log(claim)
        return row


class _Network:
    """What the drafters' cache and descriptions ask of a network."""

    pages, page_size, context_limit, max_rows = 600, 32, 8192, 256
    window = None

    def __init__(self, clock: Clock, seconds: PassTime) -> None:
        self.clock, self.seconds = clock, seconds
        self.opinions: Opinions
        self.lender = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.checkpoint = SimpleNamespace(describe=lambda: "a simulated head")

    def copy_page(self, source: int, target: int) -> None:
        raise AssertionError("simulated texts share nothing")


class _Head(_Network):
    """A head that is run row by row; row t guesses token t + 2."""

    parts = 2

    def run(self, feeds: Sequence[Feed], part: int) -> Result:
        self.clock.now += self.seconds.cost(sum(len(feed.tokens) for feed in feeds))
        rows = [self.opinions.row(feed.positions[row] + 2) for feed in feeds for row in feed.wanted]
        states = np.zeros((len(rows), 1), np.float32)
        return Result(np.zeros(len(rows), np.int32), np.array(rows), states, states)


class _Blocks(_Network):
    """A block drafter's network; slot k of a block behind n filed rows guesses token n + 1 + k."""

    places = None

    def __init__(self, clock: Clock, seconds: PassTime, block: int) -> None:
        super().__init__(clock, seconds)
        self.config = SimpleNamespace(block=block, slots=block, taps=(1,))

    def file(self, features: Any, start: int, table: Any, window_table: Any = None) -> None:
        pass

    def speak(self, blocks: Sequence[Block]) -> Any:
        self.clock.now += self.seconds.cost(len(blocks) * self.config.block)
        logits = [np.array([self.opinions.row(b.start + 1 + k) for k in range(b.slots)]) for b in blocks]
        return logits, [np.zeros((0, 0), np.float32)] * len(blocks)


class HeadSimulation(Simulation):
    """Writes texts with a head beside the target.

    Args:
        head: pass times of the head.
        block: slots of a block; None for a head that guesses token by token.
        topk: of such a head.
    """

    def __init__(
        self, target: dict[int, float], head: dict[int, float], block: int | None = None, topk: int = 4
    ) -> None:
        super().__init__(target, head)
        costs, ends = PassTime(head), frozenset[int]()
        if block is None:
            self.network: Any = _Head(self.clock, PassTime(head))
            drafter: Any = HeadDrafter(
                "head", self.network, (1,), None, ends, costs, topk=topk, clock=self.clock
            )
        else:
            self.network = _Blocks(self.clock, PassTime(head), block)
            nobody = SimpleNamespace(sure=lambda: None, follow=lambda token: None)
            heads: Any = SimpleNamespace(markov=None, open=lambda hidden, anchor: nobody)
            drafter = BlockDrafter("head", self.network, heads, ends, costs, clock=self.clock)
        self.planner = Planner(self.planner.pass_time, [drafter], clock=self.clock)
        self.claims: Sequence[float] | None = None
        self.rivals: Sequence[Chance] = ()

    def _give(self, rule: Guessing) -> None:
        self.network.opinions = rule

    def _rule(self, text: Sequence[int], chance: Chance, seed: int) -> Guessing:
        return Opinions(text, (chance, *self.rivals), self.claims, seed)
