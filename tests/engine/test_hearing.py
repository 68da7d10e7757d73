"""Drafters that read hidden states get those of every committed token, once and in order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from paceline.core import Context, Draft, Floats, Outcome, SamplingParams
from support.drafters import RandomTree, following
from support.engines import GREEDY, RULE, VOCAB_SIZE, engine_for, finish, submit
from support.planners import FixedPlanner
from support.stub_target import greedy, mix, states

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


class Listener:
    """Drafts as another does, and keeps what it hears."""

    name = "listener"

    def __init__(self, inner: RandomTree, layers: tuple[int, ...]) -> None:
        self.inner = inner
        self.layers = layers
        self.heard: dict[int, dict[int, list[Floats]]] = {}  # request -> position -> states by layer

    def propose(self, context: Context, budget: int) -> Draft:
        return self.inner.propose(context, budget)

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        mine = self.heard.setdefault(context.request, {})
        for i in range(len(hidden[self.layers[0]])):
            assert start + i not in mine, "heard twice"
            assert start + i < len(context.tokens)
            mine[start + i] = [hidden[layer][i].copy() for layer in self.layers]

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        if outcome is not None:  # all but the last token have been heard by the time drafters follow the text
            assert max(self.heard[context.request]) == len(context.tokens) - 2
        self.inner.commit(context, outcome)

    def forget(self, context: Context) -> None:
        self.inner.forget(context)


def expected(tokens: list[int], layer: int) -> Floats:
    array = np.asarray(tokens)
    histories = np.cumsum(mix(array, np.arange(len(array))), dtype=np.uint64)
    return states(histories, array, layer)


def listener(output: list[int], seed: int) -> Listener:
    inner = RandomTree(VOCAB_SIZE, seed, next_token=following([*PROMPT, *output]), truth=0.6)
    return Listener(inner, (2, 7))


@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_heard_once_and_as_plain_decoding_would_compute_it(seed: int) -> None:
    output = greedy(RULE, PROMPT, 32)
    drafter = listener(output, seed)
    engine = engine_for(max_rows=9)
    mine = submit(engine, PROMPT, planner=FixedPlanner(drafter, 1 + seed % 6))
    other = submit(engine, PROMPT[::-1], planner=FixedPlanner())
    completion, _ = finish(engine, mine, other)
    assert completion.tokens == output
    (heard,) = drafter.heard.values()
    tokens = [*PROMPT, *output]
    assert sorted(heard) == list(range(len(tokens) - 1))
    for index, layer in enumerate(drafter.layers):
        states = np.stack([heard[position][index] for position in range(len(tokens) - 1)])
        np.testing.assert_array_equal(states, expected(tokens, layer)[:-1])


def test_a_cached_prefix_is_a_gap() -> None:
    output = greedy(RULE, PROMPT, 32)
    engine = engine_for()
    finish(engine, submit(engine, PROMPT))
    drafter = listener(output, 5)
    (completion,) = finish(engine, submit(engine, PROMPT, planner=FixedPlanner(drafter, 3)))
    assert completion.cached_tokens > 0
    (heard,) = drafter.heard.values()
    assert sorted(heard) == list(range(completion.cached_tokens, len(PROMPT) + len(output) - 1))


def test_the_target_listens_only_while_somebody_reads() -> None:
    engine = engine_for()
    drafter = listener(greedy(RULE, PROMPT, 4), 1)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    finish(engine, submit(engine, PROMPT, params, FixedPlanner(drafter, 2)))
    assert engine.target.heard == (2, 7)
    finish(engine, submit(engine, PROMPT, GREEDY))
    assert engine.target.heard == ()
