"""Whether and how far a draft model drafts, in simulated time: near the best, never much below plain."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.planning.forecast import Forecast
from support.simulated_drafting import Simulation
from support.tiny_tokenizer import VOCAB_SIZE

TARGET = {1: 10e-3, 2: 10.2e-3, 4: 10.6e-3, 8: 12e-3, 16: 20e-3}


def scaled(factor: float) -> dict[int, float]:
    return {rows: seconds * factor for rows, seconds in TARGET.items()}


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 2, length).tolist()


def best_speedup(simulation: Simulation, acceptance: float, draft_cost: float) -> float:
    """Of the best fixed draft length, by the textbook's formula."""
    one = simulation.target.cost(1)
    return max(
        Forecast(acceptance, n, draft_cost, simulation.target.cost(1 + n) / one).speedup for n in range(12)
    )


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.85])
def test_near_the_speed_that_the_formula_promises(acceptance: float) -> None:
    simulation = Simulation(TARGET, scaled(1 / 8))
    seconds = plain = 0.0
    for i in range(12):
        seconds += simulation.write(text(i, 300), 20, lambda _: acceptance, seed=i)
        plain += simulation.plain(280)
    assert plain / seconds >= 0.9 * best_speedup(simulation, acceptance, 1 / 8)


def test_better_than_the_formula_where_the_model_knows_when_it_knows() -> None:
    """Easy and hard tokens in turn, 0.7 on average: no fixed length is as good."""
    simulation = Simulation(TARGET, scaled(1 / 8))
    easy = np.random.default_rng(5).random(5000) < 0.65
    seconds = plain = 0.0
    for i in range(12):
        seconds += simulation.write(text(i, 300), 20, lambda at: 0.97 if easy[at] else 0.2, seed=i)
        plain += simulation.plain(280)
    assert plain / seconds > best_speedup(simulation, 0.7, 1 / 8)


@pytest.mark.parametrize("cost", [0.05, 1 / 8, 0.5])
@pytest.mark.parametrize("length", [64, 300])
def test_a_model_that_is_always_wrong_costs_little(cost: float, length: int) -> None:
    simulation = Simulation(TARGET, scaled(cost))
    seconds = plain = 0.0
    for i in range(20):
        seconds += simulation.write(text(i, 20 + length), 20, lambda _: 0.01, seed=i)
        plain += simulation.plain(length)
    assert seconds <= 1.02 * plain


def test_a_single_text_that_is_never_guessed_costs_little_after_many_that_were() -> None:
    """What was learnt elsewhere promises much here; the text's own purse ends it."""
    simulation = Simulation(TARGET, scaled(1 / 8))
    for i in range(6):
        simulation.write(text(i, 300), 20, lambda _: 0.8, seed=i)
    for i in range(6, 12):
        seconds = simulation.write(text(i, 280), 20, lambda _: 0.02, seed=i)
        assert seconds <= 1.025 * simulation.plain(260)


@pytest.mark.parametrize("cost", [0.8, 1.0, 3.0])
def test_a_model_as_dear_as_the_target_is_left_alone(cost: float) -> None:
    simulation = Simulation(TARGET, scaled(cost))
    seconds = simulation.write(text(1, 600), 20, lambda _: 0.75)
    assert seconds <= 1.02 * simulation.plain(580)


def test_a_model_that_becomes_useful_is_found_out() -> None:
    simulation = Simulation(TARGET, scaled(1 / 8))
    for i in range(10):
        simulation.write(text(i, 300), 20, lambda _: 0.02, seed=i)
    useful = [simulation.write(text(i, 300), 20, lambda _: 0.85, seed=i) for i in range(10, 40)]
    assert sum(useful[-5:]) < 0.7 * 5 * simulation.plain(280)


def test_a_long_prompt_is_only_read_where_enough_text_follows() -> None:
    """Reading 2000 tokens takes the draft model as long as 25 tokens take the target."""
    simulation = Simulation(TARGET, scaled(1 / 8) | {2000: 0.25})
    seconds = simulation.write(text(1, 2010), 2000, lambda _: 0.8)
    assert seconds <= 1.02 * simulation.plain(10)
