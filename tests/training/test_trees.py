"""Trees of fitted heads against chains of the same heads, in simulated time.

Texts, guesses and plans are real; what a pass takes is what one of a 0.5B model takes on two cores.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core import SamplingParams
from paceline.engine import request
from paceline.engine.engine import Engine
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from support.engines import finish, submit
from support.fitted import FITTED, PROMPTS, TOKENS, Tiny
from support.planners import FixedPlanner
from support.simulated_drafting import Clock
from support.simulated_heads import TARGET

HEAD = {1: 1.3e-3, 8: 1.7e-3, 16: 2.3e-3}


class Settled(PassTime):
    """Pass times that are known for good."""

    def observe(self, rows: int, seconds: float) -> None:
        pass


class Priced:
    """A fitted head and its target, whose passes take simulated time."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.clock = Clock()
        self.tiny = Tiny()
        self.drafter = self.tiny.drafter(kind, FITTED / kind, costs=Settled(HEAD), **options)
        self.drafter._clock = self.clock
        target, head, seconds, own = self.tiny.target, self.drafter.head, PassTime(TARGET), PassTime(HEAD)
        forward, run = target.forward, head.run

        def timed_forward(rows: Any) -> Any:
            self.clock.now += seconds.cost(len(rows.tokens))
            return forward(rows)

        def timed_run(feeds: Any, part: int) -> Any:
            self.clock.now += own.cost(sum(len(feed.tokens) for feed in feeds))
            return run(feeds, part)

        target.forward, head.run = timed_forward, timed_run  # type: ignore[method-assign]

    def planner(self) -> Planner:
        return Planner(Settled(TARGET), [self.drafter], clock=self.clock)

    def speed(self, planner: request.Planner, temperature: float) -> float:
        """Tokens per second over all prompts, one after the other."""
        engine, written = Engine(self.tiny.target, self.tiny.tokenizer), 0
        for seed, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True)
            (one,) = finish(engine, submit(engine, self.tiny.tokenizer.encode(prompt), params, planner))
            written += len(one.tokens)
        return written / self.clock.now


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_a_tree_writes_faster_than_the_best_chain(kind: str, temperature: float) -> None:
    tree = Priced(kind)
    chain = Priced(kind, topk=1)
    chains = [chain.speed(chain.planner(), temperature)]
    for length in (1, 2, 3, 4):
        fixed = Priced(kind, topk=1)
        chains.append(fixed.speed(FixedPlanner(fixed.drafter, length), temperature))
    assert tree.speed(tree.planner(), temperature) > 1.02 * max(chains)
