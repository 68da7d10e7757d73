"""Pruning must never change the winner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import Floats
from paceline.sampling import processors
from paceline.sampling.noise import BLOCK, Noise
from paceline.sampling.race import race, race_among, race_nucleus, scale
from support.goodness import chi_square_fits


def unpruned(row: Floats, temperature: float, noise: Noise, position: int) -> int:
    """Gumbel-max with the noise of every token."""
    scores = scale(row, float(row.max()), temperature) + noise.gumbel(position, np.arange(len(row)))
    return int(scores.argmax())


def shaped(kind: str, size: int, seed: int) -> Floats:
    """[size] logits of one of the shapes that stress pruning."""
    random = np.random.default_rng(seed)
    row = random.normal(0, 3, size)
    if kind == "flat":
        row *= 0.01
    elif kind == "constant":
        row[:] = -7.0
    elif kind == "peaked":
        row[random.integers(size)] += 30
    elif kind == "rounded":
        row = np.round(row)
    elif kind == "banned":
        row[random.random(size) < 0.9] = -np.inf
        row[random.integers(size)] = 1.0
    elif kind == "huge":
        row *= 1e30
    return row.astype(np.float32)


KINDS = ("normal", "flat", "constant", "peaked", "rounded", "banned", "huge")
rows = st.builds(
    shaped,
    st.sampled_from(KINDS),
    st.one_of(st.integers(1, 40), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 8 * BLOCK])),
    st.integers(0, 10_000),
)
temperatures = st.sampled_from([1e-300, 1e-40, 1e-12, 1e-3, 0.3, 0.8, 1.0, 2.0, 100.0])


@given(rows, temperatures, st.integers(0, 2**31 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=400, deadline=None)
def test_the_pruned_race_has_the_unpruned_winner(
    row: Floats, temperature: float, position: int, seed: int
) -> None:
    noise = Noise(seed, len(row))
    assert race(row, temperature, noise, position) == unpruned(row, temperature, noise, position)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.8, 2.0])
def test_the_pruned_race_has_the_unpruned_winner_at_full_size(kind: str, temperature: float) -> None:
    row = shaped(kind, 151_936, 1)
    noise = Noise(99, len(row))
    for position in range(6):
        assert race(row, temperature, noise, position) == unpruned(row, temperature, noise, position)


@given(
    rows,
    temperatures,
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999]),
    st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=400, deadline=None)
def test_a_lazy_nucleus_has_the_winner_of_the_explicit_one(
    row: Floats, temperature: float, top_p: float, min_p: float, seed: int
) -> None:
    noise = Noise(seed, len(row))
    kept = processors.keep(row, temperature, 0, top_p, min_p)
    masked = np.full_like(row, -np.inf)
    masked[kept] = row[kept]
    for position in range(4):
        expected = unpruned(masked, temperature, noise, position)
        assert race_nucleus(row, temperature, top_p, min_p, noise, position) == expected
        assert race_among(row, kept, temperature, noise, position) == expected


def test_a_winner_below_the_guess_is_found() -> None:
    """The best token has bad luck and so has everyone else: the first bound must give way."""
    row = np.full(BLOCK, -8.0, np.float32)
    row[100] = 0.0
    noise = Noise(0, BLOCK)
    surprises = 0
    for position in range(3000):
        scores = row + noise.gumbel(position, np.arange(BLOCK))
        winner = int(scores.argmax())
        assert race(row, 1.0, noise, position) == winner
        surprises += scores[winner] < -1 and winner != 100
    assert surprises > 3


def test_a_row_gives_the_same_token_wherever_it_lies_in_memory() -> None:
    """A row among draft rows is not aligned like a row alone."""
    row = shaped("normal", 50_001, 5)
    for offset in range(1, 9):
        place = np.empty(50_001 + 16, np.float32)[offset : offset + 50_001]
        place[:] = row
        for position in range(4):
            noise = Noise(1, len(row))
            assert race(place, 1.0, noise, position) == race(row, 1.0, noise, position)
            assert race_nucleus(place, 2.0, 0.9, 0.0, noise, position) == race_nucleus(
                row, 2.0, 0.9, 0.0, noise, position
            )
        assert processors.weigh(place, row.max(), 0.7).sum() == processors.weigh(row, row.max(), 0.7).sum()


def test_the_winner_is_a_sample_of_the_softmax() -> None:
    row = np.array([1.0, -1.0, 0.5, 2.0, -np.inf, 0.5], np.float32)
    weights = np.exp((row - row.max()) / 0.7)
    wins = np.zeros(6)
    for seed in range(4):
        noise = Noise(seed, 6)
        for position in range(2000):
            wins[race(row, 0.7, noise, position)] += 1
    assert chi_square_fits(wins, weights / weights.sum())
    assert not chi_square_fits(wins, np.full(6, 1 / 6))
