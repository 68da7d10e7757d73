"""Rotary position embeddings: how fast each pair of dimensions turns, in all variants.

Pair i of `dim` dimensions turns by base^(-2i / dim) per position (arXiv:2104.09864). The variants stretch
that to texts longer than the model was first trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One rope of a model.

    Attributes:
        dim: dimensions of a head that turn; the others stay as they are.
        kind: a key of `VARIANTS`.
        factor: how many times longer than `original` the texts may be.
        original: positions the model was first trained on.
        magnitude: what cosines and sines are multiplied by; None means what the variant prescribes.
        beta_fast, beta_slow: YaRN: pairs that turn more often than this within `original` keep their speed,
            those that turn less often slow down by the whole factor.
    """

    base: float
    dim: int
    kind: str = "none"
    factor: float = 1.0
    original: int = 0
    magnitude: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def frequencies(self, context: int, divisors: Sequence[float] | None = None) -> list[float]:
        """Angle per position of each turning pair [dim / 2].

        Args:
            context: positions of the longest text there can be. A variant that adapts itself to the text's
                length takes this one: turned keys stay in the cache, so every position must turn alike.
            divisors: what the file divides each frequency by [dim / 2].
        """
        base = self.base
        if self.kind == "dynamic":
            base = _dynamic_base(self, context)
        plain = [base ** (-2.0 * i / self.dim) for i in range(self.dim // 2)]
        if divisors is not None:
            plain = [f / by for f, by in zip(plain, divisors, strict=True)]
        stretch = VARIANTS[self.kind]
        return plain if stretch is None else stretch(self, plain)

    @property
    def scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.magnitude is not None:
            return self.magnitude
        if self.kind == "yarn" and self.factor > 1:
            return 1.0 + 0.1 * math.log(self.factor)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original))
        return 1.0


def _dynamic_base(rope: Rope, context: int) -> float:
    """NTK-aware scaling by the text's length, as transformers defines it."""
    stretch = rope.factor * max(context, rope.original) / rope.original - (rope.factor - 1.0)
    return float(rope.base * stretch ** (rope.dim / max(rope.dim - 2, 1)))


def _linear(rope: Rope, plain: list[float]) -> list[float]:
    return [f / rope.factor for f in plain]


def _yarn(rope: Rope, plain: list[float]) -> list[float]:
    """arXiv:2309.00071: slow pairs are interpolated, fast ones kept, a ramp over the pairs between."""

    def pair(turns: float) -> float:
        return rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low = max(math.floor(pair(rope.beta_fast)), 0)
    high = min(math.ceil(pair(rope.beta_slow)), rope.dim - 1)
    width = max(high - low, 0.001)
    out = []
    for i, f in enumerate(plain):
        slowed = min(max((i - low) / width, 0.0), 1.0)
        out.append(f / rope.factor * slowed + f * (1.0 - slowed))
    return out


VARIANTS: dict[str, Callable[[Rope, list[float]], list[float]] | None] = {
    "none": None,
    "linear": _linear,
    "dynamic": None,
    "yarn": _yarn,
    "longrope": None,
}
"""By name: what becomes of the frequencies. Llama 3's and LongRoPE (arXiv:2402.13753) come as divisors."""
