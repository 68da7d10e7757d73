"""The noise: published vectors, purity, and the distribution it claims."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.sampling.noise import BLOCK, Noise, Stream, _open_uniform, philox, round_keys
from support.goodness import chi_square_fits, kolmogorov_smirnov_fits

VOCABULARY = 151_936


def gumbel_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.exp(-np.exp(-x)))


# Random123's known answers for philox4x32, 10 rounds: counter, key (low word first), output.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    together = np.tile(np.array(counter, np.uint32)[:, None], 3)
    words = philox(together, round_keys(key[0] | key[1] << 32))
    assert words.T.tolist() == [list(expected)] * 3


def test_uniforms_lie_strictly_between_zero_and_one() -> None:
    zero, full = np.array([0], np.uint32), np.array([0xFFFFFFFF], np.uint32)
    assert _open_uniform(zero, zero)[0] == 2.0**-53
    assert _open_uniform(full, full)[0] == 1 - 2.0**-53


def test_noise_is_what_it_was() -> None:
    """Recorded: a change here changes every text sampled with a seed."""
    noise = Noise(42, VOCABULARY)
    ids = np.array([0, 1, 511, 512, 100_000])
    recorded = [-0.31176087, -0.51373709, -0.67509631, 0.45070233, -0.43831583]
    np.testing.assert_allclose(noise.gumbel(7, ids), recorded, atol=1e-8)
    np.testing.assert_allclose(noise.uniform(7, [0, 5], Stream.ACCEPT), [0.32220477, 0.51642153], atol=1e-8)
    assert noise.ceilings(7)[0][:4].tolist() == [169, 875, 1479, 1554]


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=70),
)
@settings(max_examples=100, deadline=None)
def test_noise_of_a_token_depends_on_nothing_but_seed_position_and_id(
    seed: int, position: int, ids: list[int]
) -> None:
    together = Noise(seed, VOCABULARY).gumbel(position, np.array(ids))
    warm = Noise(seed, max(ids) + 1)
    warm.gumbel(max(position - 3, 0), np.array(ids[:1]))
    alone = [warm.gumbel(position, np.array([token]))[0] for token in ids]
    assert together.tolist() == alone


def test_a_negative_seed_is_its_twos_complement_and_the_ends_of_the_range_work() -> None:
    ids = np.arange(5)
    negative, positive = Noise(-1, 5), Noise(2**64 - 1, 5)
    assert negative.gumbel(3, ids).tolist() == positive.gumbel(3, ids).tolist()
    assert Noise(-(2**63), 5).gumbel(3, ids).tolist() == Noise(2**63, 5).gumbel(3, ids).tolist()
    assert Noise(0, 5).gumbel(3, ids).tolist() != Noise(1, 5).gumbel(3, ids).tolist()


def test_noise_is_gumbel_over_ids_positions_and_seeds() -> None:
    over_ids = Noise(1, 60_000).gumbel(0, np.arange(60_000))
    one = np.array([777])
    noise = Noise(2, 1000)
    over_positions = [noise.gumbel(position, one)[0] for position in range(3000)]
    over_seeds = [Noise(seed, 1000).gumbel(9, one)[0] for seed in range(3000)]
    for sample in (over_ids, over_positions, over_seeds):
        assert kolmogorov_smirnov_fits(sample, gumbel_cdf)
    assert not kolmogorov_smirnov_fits(over_ids + 0.02, gumbel_cdf), "the test has power"


def test_tokens_of_one_block_are_independent() -> None:
    """The maximum of any two must be Gumbel shifted by log 2, wherever the two lie."""
    ids = np.arange(2 * BLOCK)
    noise = Noise(3, len(ids))
    table = np.array([noise.gumbel(position, ids) for position in range(400)])
    for other in (table[:, ::-1], np.roll(table, 1, axis=1), np.roll(table, 1, axis=0)):
        higher = np.maximum(table, other)[::2, : BLOCK // 2]
        assert kolmogorov_smirnov_fits(higher, lambda x: gumbel_cdf(x - np.log(2)))
    scores = gumbel_cdf(table).ravel() - 0.5
    for lag in (1, 2, BLOCK - 1, BLOCK, 2 * BLOCK):
        correlation = float(np.corrcoef(scores[:-lag], scores[lag:])[0, 1])
        assert abs(correlation) < 4 / np.sqrt(len(scores))


def test_every_token_of_a_block_wins_equally_often() -> None:
    noise = Noise(4, VOCABULARY)
    owners = np.concatenate([noise.ceilings(position)[0] for position in range(200)])
    assert chi_square_fits(np.bincount(owners % BLOCK, minlength=BLOCK), np.full(BLOCK, 1 / BLOCK))
    few = np.array([3, 70, 200, 201, 511])
    small = Noise(4, BLOCK)
    wins = np.bincount([int(small.gumbel(position, few).argmax()) for position in range(5000)], minlength=5)
    assert chi_square_fits(wins, np.full(5, 0.2))


def test_ceilings_are_the_highest_noise_of_each_block() -> None:
    noise = Noise(5, 4 * BLOCK)
    for position in (0, 7, 8, 123_456):
        owners, ceilings = noise.ceilings(position)
        table = noise.gumbel(position, np.arange(4 * BLOCK)).reshape(4, BLOCK)
        assert ceilings.tolist() == table.max(axis=1).tolist()
        assert owners.tolist() == (table.argmax(axis=1) + np.arange(4) * BLOCK).tolist()


def test_streams_are_independent_and_uniform() -> None:
    noise = Noise(6, 50_000)
    ids = np.arange(50_000)
    draws = {stream: noise.uniform(11, ids, stream) for stream in Stream}
    for stream, sample in draws.items():
        assert kolmogorov_smirnov_fits(sample, lambda x: x)
        for other, values in draws.items():
            if other != stream:
                assert abs(float(np.corrcoef(sample, values)[0, 1])) < 4 / np.sqrt(len(ids))
