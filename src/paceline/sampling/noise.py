"""Noise by position: every token id has its own Gumbel variate at every position of every seed.

The noise of a token is a pure function of (seed, absolute position, token id). It never depends on how
many tokens are drawn together, on the vocabulary's size or on the pass that produced the logits; that is
what lets a checked draft write the same text as plain decoding.

Source of bits: Philox-4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import sys
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.int64]

BLOCK = 512
"""Token ids per block. Part of the definition of the noise: changing it changes every sampled text."""

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_LOW = 0 if sys.byteorder == "little" else 1
_WINDOW = 8


class Stream(IntEnum):
    """What a number is for. Numbers of different streams are independent at equal position and id."""

    BLOCK_FIRST = 0
    TOKEN = 1
    ACCEPT = 2
    RESIDUAL = 3


def round_keys(seed: int) -> Words:
    """[rounds, 2, 1] the key schedule of `philox` for a 64-bit seed, whose low word comes first."""
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)
    schedule = key + np.arange(_ROUNDS, dtype=np.uint64)[:, None] * _WEYL
    return schedule.astype(np.uint32)[:, :, None]


def philox(counter: Words, keys: Words) -> Words:
    """Philox-4x32-10 of many counters under one key.

    Args:
        counter: [4, n] 32-bit words.
        keys: [rounds, 2, 1] the key's schedule.

    Returns:
        [4, n] 32-bit words.
    """
    even, odd = counter[0::2].astype(np.uint64), counter[1::2].copy()
    product = np.empty_like(even)
    # Each half of the state is fed by the other half's product: hence the reversal.
    words = product.view(np.uint32).reshape(2, -1, 2)[::-1]
    low, high = words[..., _LOW], words[..., 1 - _LOW]
    for key in keys:
        np.multiply(even, _MULTIPLIERS, out=product)
        odd ^= key
        np.bitwise_xor(odd, high, out=even)
        odd[...] = low
    return np.stack((even[0].astype(np.uint32), odd[0], even[1].astype(np.uint32), odd[1]))


def _open_uniform(high: Words, low: Words) -> Doubles:
    """Uniform numbers strictly between 0 and 1: the midpoints of 2^52 equal cells, exact in float64."""
    return (high * 2.0**20 + (low >> np.uint32(12)) + 0.5) * 2.0**-52


class Noise:
    """The noise of one seed.

    The Gumbel variate of a token is g = -log(E) with E an Exp(1) arrival time, and the arrival times of a
    block of 512 ids are drawn first arrival first: the earliest of 512 is Exp(1) / 512, it belongs to each
    id with equal chance, and the others, exponentials being memoryless, come an independent Exp(1) after
    it. All arrival times are thus independent Exp(1), exactly, and the highest Gumbel of a whole block is
    known from one draw, which is what lets `race` look at a handful of tokens instead of the vocabulary.

    Args:
        seed: any integer in [-2^63, 2^64); a negative seed equals its two's complement.
        vocab_size: ids are below it; it does not influence the noise.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._keys = round_keys(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._blocks = -(-vocab_size // BLOCK)
        self._window = -1
        self._owners: Indices = np.empty((0, 0), np.int64)
        self._firsts: Doubles = np.empty((0, 0))

    def uniform(self, position: int, ids: ArrayLike, stream: Stream) -> Doubles:
        """[n] uniforms in the open interval (0, 1), one for each id."""
        bits = self._bits(position, np.atleast_1d(ids), stream)
        return _open_uniform(bits[0], bits[1])

    def gumbel(self, position: int, ids: Indices) -> Doubles:
        """[n] Gumbel(0, 1) noise of the token ids at an absolute position."""
        owners, firsts = self._first_arrivals(position)
        blocks = ids // BLOCK
        later = -np.log(self.uniform(position, ids, Stream.TOKEN))
        later[ids == owners[blocks]] = 0.0
        return np.asarray(-np.log(firsts[blocks] + later))

    def ceilings(self, position: int) -> tuple[Indices, Doubles]:
        """The highest Gumbel noise in each block of ids.

        Returns:
            [blocks] the id that has it (in the last block it may lie beyond the vocabulary) and
            [blocks] its value.
        """
        owners, firsts = self._first_arrivals(position)
        return owners, -np.log(firsts)

    def _first_arrivals(self, position: int) -> tuple[Indices, Doubles]:
        """[blocks] the id that arrives first in each block, and when.

        Computed for a few neighbouring positions at once, since decoding will ask for them next and the
        cost is mostly per call.
        """
        window, offset = divmod(position, _WINDOW)
        if window != self._window:
            pairs = -(-self._blocks // 2)
            positions = np.repeat(np.arange(_WINDOW) + window * _WINDOW, pairs)
            bits = self._bits(positions, np.tile(np.arange(pairs), _WINDOW), Stream.BLOCK_FIRST)
            # One output of Philox serves two blocks, and 64 bits a block: 52 say when, the last 9 who.
            words = bits.reshape(2, 2, _WINDOW, pairs).transpose(1, 2, 3, 0).reshape(2, _WINDOW, -1)
            high, low = words[..., : self._blocks]
            self._firsts = -np.log(_open_uniform(high, low)) / BLOCK
            self._owners = np.arange(self._blocks) * BLOCK + low % BLOCK
            self._window = window
        return self._owners[offset], self._firsts[offset]

    def _bits(self, position: int | Indices, index: Indices, stream: Stream) -> Words:
        """[4, n] random words for (position, index, stream)."""
        counter = np.zeros((4, len(index)), np.uint32)
        counter[0] = index
        counter[1] = position
        counter[2] = stream
        return philox(counter, self._keys)
