"""Noise by position: every token id has its own Gumbel variate at every position of every seed.

The noise of a token is a pure function of (seed, absolute position, token id). It never depends on how
many tokens are drawn together, on the vocabulary's size or on the pass that produced the logits; that is
what lets a checked draft write the same text as plain decoding.

Source of bits: Philox-4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]
"""32-bit words, kept in 64-bit lanes so that products do not overflow."""
Doubles = NDArray[np.float64]
Indices = NDArray[np.int64]

BLOCK = 512
"""Token ids per block. Part of the definition of the noise: changing it changes every sampled text."""

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


class Stream(IntEnum):
    """What a number is for. Numbers of different streams are independent at equal position and id."""

    BLOCK_FIRST = 0
    TOKEN = 1
    ACCEPT = 2
    RESIDUAL = 3


@lru_cache(maxsize=256)
def _round_keys(seed: int) -> Words:
    """[rounds, 2, 1] the key schedule of a 64-bit seed, low word first."""
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)
    schedule = (key + np.arange(_ROUNDS, dtype=np.uint64)[:, None] * _WEYL) & _LOW
    return schedule[:, :, None]


def philox(counter: Words, seed: int) -> Words:
    """Philox-4x32-10 of many counters under one key.

    Args:
        counter: [4, n] 32-bit words.
        seed: the 64-bit key.

    Returns:
        [4, n] 32-bit words.
    """
    even, odd = counter[0::2].copy(), counter[1::2].copy()
    product = np.empty_like(even)
    crossed = product[::-1]  # each half of the state is fed by the other half's product
    for key in _round_keys(seed):
        np.multiply(even, _MULTIPLIERS, out=product)
        np.right_shift(crossed, _HALF, out=even)
        even ^= odd
        even ^= key
        np.bitwise_and(crossed, _LOW, out=odd)
    return np.stack((even[0], odd[0], even[1], odd[1]))


def _open_uniform(high: Words, low: Words) -> Doubles:
    """Uniform numbers strictly between 0 and 1: the midpoints of 2^52 equal cells, exact in float64."""
    cells = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (cells.astype(np.float64) + 0.5) * 2.0**-52


class Noise:
    """The noise of one seed.

    The Gumbel variate of a token is g = -log(E) with E an Exp(1) arrival time, and the arrival times of a
    block of 512 ids are drawn first arrival first: the earliest of 512 is Exp(1) / 512, it belongs to each
    id with equal chance, and the others, exponentials being memoryless, come an independent Exp(1) after
    it. All arrival times are thus independent Exp(1), exactly, and the highest Gumbel of a whole block is
    known from one draw, which is what lets `race` look at a handful of tokens instead of the vocabulary.

    Args:
        seed: any integer in [-2^63, 2^64); a negative seed equals its two's complement.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed & 0xFFFF_FFFF_FFFF_FFFF

    def uniform(self, position: int, ids: ArrayLike, stream: Stream) -> Doubles:
        """[n] uniforms in the open interval (0, 1), one for each id."""
        index = np.atleast_1d(np.asarray(ids, np.uint64))
        bits = self._bits(position, index, np.full(len(index), stream, np.uint64))
        return _open_uniform(bits[0], bits[1])

    def gumbel(self, position: int, ids: Indices) -> Doubles:
        """[n] Gumbel(0, 1) noise of the token ids at an absolute position."""
        blocks = ids // BLOCK
        bits = self._bits(
            position,
            np.concatenate((blocks, ids)).astype(np.uint64),
            np.repeat(np.array([Stream.BLOCK_FIRST, Stream.TOKEN], np.uint64), len(ids)),
        )
        firsts, others = np.split(-np.log(_open_uniform(bits[0], bits[1])), 2)
        owners = blocks * BLOCK + (bits[2, : len(ids)] % BLOCK).astype(np.int64)
        return -np.log(firsts / BLOCK + np.where(ids == owners, 0.0, others))

    def ceilings(self, position: int, blocks: int) -> tuple[Indices, Doubles]:
        """The highest Gumbel noise in each of the first `blocks` blocks of ids.

        Returns:
            [blocks] the id that has it (it may lie beyond the vocabulary), and [blocks] its value.
        """
        index = np.arange(blocks, dtype=np.uint64)
        bits = self._bits(position, index, np.full(blocks, Stream.BLOCK_FIRST, np.uint64))
        first = -np.log(_open_uniform(bits[0], bits[1])) / BLOCK
        owner = (index * BLOCK + bits[2] % BLOCK).astype(np.int64)
        return owner, -np.log(first)

    def _bits(self, position: int, index: Words, stream: Words) -> Words:
        """[4, n] random words for (position, index, stream)."""
        counter = np.zeros((4, len(index)), np.uint64)
        counter[0] = index
        counter[1] = position
        counter[2] = stream
        return philox(counter, self.seed)
