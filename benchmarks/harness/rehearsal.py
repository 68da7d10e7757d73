"""Heads whose passes are real and whose opinions are given.

A head of random weights takes exactly the time of a trained one and guesses nothing. So its guesses are
replaced behind its back: the text is known beforehand, at each place a first, second, ... choice is right or
none is, and the head holds each to be as likely as it is, or as likely as it is told to claim.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import Floats
from paceline.drafters.dflash import BlockDrafter
from paceline.drafters.hearing import StateDrafter
from paceline.models.config import DecoderConfig
from paceline.sampling.sampler import Sampler
from support import block_heads, tiny_heads, tiny_mtp

BLOCK = 8
REDUCED = 32000
RANK = 256
_WRONG = -1

KINDS = ("eagle3", "eagle", "mtp", "dflash", "dspark")


def write_head(kind: str, config: DecoderConfig, vocab: int, folder: Path, keep: Sequence[int]) -> Path:
    """Write a random head of a kind for a target, in the shape that is published for it.

    EAGLE and MTP heads have one layer of the target's shape, block drafters five of them and blocks of 8
    (SpecForge's for Qwen2.5-0.5B, but for the block); EAGLE-3 has 32000 ids of its own, the others the
    target's output matrix.

    Args:
        keep: ids that a reduced vocabulary must hold.
    """
    depth = config.layers
    shape: dict[str, Any] = {
        "width": config.width,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab": vocab,
        "target_layers": depth,
    }
    spread = tuple(round(1 + i * (depth - 4) / 4) for i in range(5))
    block = {"layers": 5, "taps": spread, "block": BLOCK, "mask": vocab - 1, "dtype": "BF16"}
    match kind:
        case "eagle3":
            taps = (2, depth // 2, depth - 3)
            return _Kept(**shape, taps=taps, draft_vocab=REDUCED, wanted=tuple(keep)).write(folder)
        case "eagle":
            return tiny_heads.TinyHead(**shape, kind="eagle", taps=(depth,), draft_vocab=0).write(folder)
        case "mtp":
            return tiny_mtp.TinyMtp(**shape, taps=(depth,), layout="DeepSeek").write(folder)
        case "dflash":
            return block_heads.TinyHead(**shape, **block).write(folder)
        case _:
            spark = {"layout": "deepspec", "markov": "vanilla", "rank": RANK, "confidence": True}
            return block_heads.TinyHead(**shape, **block, **spark).write(folder)


class _Kept(tiny_heads.TinyHead):
    """A head whose reduced vocabulary holds the ids that are wanted, and the lowest besides."""

    def __init__(self, *, wanted: Sequence[int], **shape: Any) -> None:
        super().__init__(**shape)
        object.__setattr__(self, "wanted", wanted)

    @property
    def kept(self) -> tiny_heads.Array:
        first = list(dict.fromkeys((*self.wanted, *range(self.vocab))))  # type: ignore[attr-defined]
        return np.sort(first[: self.draft_vocab])


class Script:
    """What a head will say of one text.

    Args:
        text: prompt and output.
        prompt: how many of its tokens were not written by the target.
        chances: how often the first choice is right, the second, and so on; at exactly so many places.
        seed: decides which.
        claims: how likely the head holds each choice, once those before it have failed; honest unless given.

    Attributes:
        ranks: of each place in the text, which choice is right; -1 for none.
    """

    def __init__(
        self,
        text: Sequence[int],
        prompt: int,
        chances: Sequence[float],
        seed: int,
        claims: Sequence[float] | None = None,
    ) -> None:
        written = len(text) - prompt
        ranks = np.full(written, _WRONG)
        for rank in range(len(chances)):
            start, end = (round(sum(chances[:n]) * written) for n in (rank, rank + 1))
            ranks[start:end] = rank
        np.random.default_rng(seed).shuffle(ranks)
        honest = [chance / (1.0 - sum(chances[:rank])) for rank, chance in enumerate(chances)]
        self.text, self.prompt = text, prompt
        self.ranks: list[int] = [_WRONG] * prompt + ranks.tolist()
        self.claims = honest if claims is None else claims

    def leave_out(self, known: Container[int]) -> None:
        """Have nothing right where the token is none that the head knows."""
        for at, token in enumerate(self.text):
            if token not in known:
                self.ranks[at] = _WRONG

    @property
    def acceptance(self) -> float:
        """Share of places where the first choice is right, of those that can be drafted."""
        drafted = self.ranks[self.prompt + 1 :]
        return drafted.count(0) / len(drafted)

    def passes(self, length: int) -> int:
        """Passes behind the first one with drafts of `length` first choices, or fewer where the text ends."""
        count, at = 0, self.prompt + 1
        while at < len(self.text):
            row = self.ranks[at : at + length]
            at += 1 + next((n for n, rank in enumerate(row) if rank != 0), len(row))
            count += 1
        return count


class Rehearsed:
    """Takes the place of what chooses a head's tokens: chooses in earnest, and says what the script says.

    Attributes:
        own: the head's id of each of the target's that it knows.
    """

    def __init__(self, drafter: StateDrafter) -> None:
        self._real = drafter._choices
        self.own = {token: own for own, token in enumerate(drafter._target_ids)}
        self._size = len(drafter._target_ids)
        self._row: Floats | None = None
        self._rank = 0
        self.script = Script([0, 0], 0, [1.0], 0)
        drafter._choices = self  # type: ignore[assignment]
        if isinstance(drafter, BlockDrafter):
            _confide(drafter, self)

    def pick(self, values: Floats, sampler: Sampler, position: int) -> tuple[int, float]:
        self._real.pick(values, sampler, position)
        self._rank = self._rank + 1 if values is self._row else 0
        self._row = values
        script, rank = self.script, self._rank
        at = min(position, len(script.text) - 1)
        right = self.own.get(script.text[at], 0)
        claim = script.claims[rank] if rank < len(script.claims) else 0.0
        hit = position < len(script.text) and script.ranks[at] == rank
        return (right if hit else (right + 1 + rank) % self._size), claim


def _confide(drafter: BlockDrafter, rehearsed: Rehearsed) -> None:
    """Let a confidence head, where there is one, claim what the script says too."""
    heads = drafter._heads
    if heads.sure is None:
        return
    begin = heads.open

    def open_(hidden: Floats, anchor: int) -> Any:
        chain = begin(hidden, anchor)
        sure = chain.sure

        def claim() -> float:
            sure()
            return rehearsed.script.claims[0]

        return _Confident(chain, claim)

    heads.open = open_  # type: ignore[method-assign]


class _Confident:
    """A chain that says itself how sure it is."""

    def __init__(self, chain: Any, sure: Any) -> None:
        self.latent, self.follow, self.sure = chain.latent, chain.follow, sure


@contextmanager
def timed(owner: object, name: str) -> Iterator[list[tuple[tuple[Any, ...], float]]]:
    """Collects the arguments and the seconds of each call of a method."""
    calls: list[tuple[tuple[Any, ...], float]] = []
    method = getattr(owner, name)

    def measured(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = method(*arguments)
        calls.append((arguments, time.perf_counter() - start))
        return found

    setattr(owner, name, measured)
    try:
        yield calls
    finally:
        delattr(owner, name)
