"""Whether and how far heads draft, in simulated time: near the best, never much below plain."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.planning.forecast import mean_acceptance_length
from paceline.planning.pass_time import PassTime
from support.simulated_heads import TARGET, HeadSimulation
from support.tiny_tokenizer import VOCAB_SIZE

ROW = TARGET[1]
BLOCK = 8
TOKENS = 128


def text(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 2, 16 + TOKENS).tolist()


def simulation(kind: str, cost: float, topk: int = 4) -> HeadSimulation:
    """A head that nothing is known of yet; `cost` is that of a step or a block, in passes over one row."""
    if kind == "block":
        return HeadSimulation(TARGET, {1: 0.8 * cost * ROW, 8: cost * ROW, 16: 1.9 * cost * ROW}, BLOCK)
    return HeadSimulation(TARGET, {1: cost * ROW, 8: 1.3 * cost * ROW, 16: 1.8 * cost * ROW}, topk=topk)


def formula(kind: str, cost: float, acceptance: float) -> float:
    """The speed-up of the best fixed draft length."""
    times = PassTime(TARGET)
    steps = {n: cost if kind == "block" else n * cost for n in range(1, BLOCK + 1)}
    rates = [mean_acceptance_length(acceptance, n) / (times.cost(1 + n) / ROW + steps[n]) for n in steps]
    return max(1.0, *rates)


def cold(kind: str, cost: float, acceptance: float, claims: list[float] | None = None) -> float:
    """Speed-up over a dozen texts, each the first of its head."""
    seconds = plain = 0.0
    for seed in range(12):
        alone = simulation(kind, cost)
        alone.claims = claims
        seconds += alone.write(text(seed), 16, lambda _: acceptance, seed=seed)
        plain += alone.plain(TOKENS)
    return plain / seconds


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize(("kind", "cost"), [("chain", 0.12), ("chain", 0.4), ("block", 0.35), ("block", 0.8)])
def test_the_first_texts_are_near_the_speed_that_the_formula_promises(
    kind: str, cost: float, acceptance: float
) -> None:
    assert cold(kind, cost, acceptance) >= 0.93 * formula(kind, cost, acceptance)


@pytest.mark.parametrize("acceptance", [0.02, 0.05, 0.2])
@pytest.mark.parametrize(("kind", "cost"), [("chain", 0.12), ("chain", 0.4), ("block", 0.35), ("block", 0.8)])
def test_a_head_that_is_seldom_right_is_soon_left_alone(kind: str, cost: float, acceptance: float) -> None:
    assert cold(kind, cost, acceptance) >= 0.98


@pytest.mark.parametrize(("kind", "cost"), [("chain", 0.12), ("block", 0.35), ("block", 0.8)])
def test_a_head_that_boasts_is_found_out(kind: str, cost: float) -> None:
    """Its purse bounds what one text loses, what was learnt what all lose."""
    assert cold(kind, cost, 0.05, claims=[0.9]) >= 0.96
    known = simulation(kind, cost)
    known.claims = [0.9]
    seconds = sum(known.write(text(seed), 16, lambda _: 0.05, seed=seed) for seed in range(12))
    assert seconds <= 12 * known.plain(TOKENS) / 0.98


@pytest.mark.parametrize("cost", [0.05, 0.12, 0.3])
@pytest.mark.parametrize("chances", [(0.5, 0.2, 0.1), (0.6, 0.25), (0.8, 0.1)])
def test_a_tree_writes_faster_than_the_best_chain_or_is_one(cost: float, chances: tuple[float, ...]) -> None:
    seconds = {}
    for topk in (1, 4):
        one = simulation("chain", cost, topk)
        one.rivals = [lambda _, chance=chance: chance for chance in chances[1:]]
        seconds[topk] = sum(one.write(text(i), 16, lambda _: chances[0], seed=i) for i in range(12))
    assert seconds[4] <= 1.01 * seconds[1]
    if chances[1] >= 0.2:
        assert seconds[4] < 0.95 * seconds[1]
