"""What DSpark adds to a block drafter: each token depends on the one before it, and says how sure it is.

A Markov head adds W2 . latent to a slot's logits; the latent is made of W1's row of the token before, and, in
two of its three kinds, of the slot's own state h:

    vanilla    w
    gated      sigmoid(Wg [h; w] + b) * w
    rnn        tanh(o) of (i, c, o) = W [s; w; h] + b, with s := sigmoid(i) * s + (1 - sigmoid(i)) * tanh(c)

The state begins at the anchor's slot, also where that slot predicts nothing: so speculators trains it.
A confidence head estimates sigmoid(Wc [h; w] + b), the chance that the target takes the token given that it
took those before (DSpark, arXiv 2607.05147).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.core import Floats
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.dflash_config import BlockConfig

_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_STEP = 8192


@dataclass(frozen=True, slots=True)
class _Linear:
    """A small matrix with a bias, cut by what its columns read.

    Attributes:
        state, before: [m, rank] for the recurrent state and the token before; may have no columns.
        hidden: [m, width] for the slot.
        bias: [m]
    """

    state: Floats
    before: Floats
    hidden: Floats
    bias: Floats


class ChainHeads:
    """The Markov and the confidence head of one checkpoint.

    Raises:
        ModelFileError: weights of other shapes than the configuration says, or not finite.
    """

    def __init__(self, found: Checkpoint, config: BlockConfig) -> None:
        self.found = found
        self.first = config.first
        self.markov = config.markov
        width, rank = config.decoder.width, config.markov.rank if config.markov else 0
        self.rank = rank
        self.mix: _Linear | None = None
        self.sure: _Linear | None = None
        if self.markov is not None:
            self._check_table(config.vocab)
        if self.markov is not None and self.markov.kind == "gated":
            weight, bias = self._pair("markov_head.gate_proj", rank, width + rank)
            self.mix = _Linear(weight[:, :0], weight[:, width:], weight[:, :width], bias)
        if self.markov is not None and self.markov.kind == "rnn":
            weight, bias = self._pair("markov_head.joint_proj", 3 * rank, 2 * rank + width)
            self.mix = _Linear(weight[:, :rank], weight[:, rank : 2 * rank], weight[:, 2 * rank :], bias)
        if config.confidence:
            heard = found.shape("confidence_head.proj.weight")[-1]
            weight, bias = self._pair("confidence_head.proj", 1, heard)
            if heard not in (width, width + rank):
                raise found.fault(
                    f"confidence_head.proj reads {heard} values, not {width} or {width + rank}",
                    "the checkpoint is damaged",
                )
            self.sure = _Linear(weight[:, :0], weight[:, width:], weight[:, :width], bias)

    def open(self, hidden: Floats, anchor: int) -> Chain:
        """Begin at the anchor of a block whose slots have these states [slots, width], its own first."""
        return Chain(self, hidden, anchor)

    def embed(self, token: int) -> Floats:
        """[rank] W1's row."""
        if self.markov is None:
            return np.zeros(0, np.float32)
        return self.found.values(_W1, token, token + 1).reshape(-1)

    def _pair(self, name: str, rows: int, cols: int) -> tuple[Floats, Floats]:
        for part, shape in ((".weight", (rows, cols)), (".bias", (rows,))):
            if self.found.shape(name + part) != shape:
                raise self.found.fault(
                    f"{name}{part} is {self.found.shape(name + part)}, expected {shape}",
                    "the checkpoint is damaged",
                )
        weight, bias = self.found.values(name + ".weight"), self.found.values(name + ".bias")
        self._check_finite(name, weight)
        self._check_finite(name, bias)
        return weight, bias

    def _check_table(self, vocab: int) -> None:
        if self.found.shape(_W1) != (vocab, self.rank):
            raise self.found.fault(
                f"{_W1} is {self.found.shape(_W1)}, expected {(vocab, self.rank)}",
                "the checkpoint is damaged",
            )
        for start in range(0, vocab, _STEP):
            self._check_finite(_W1, self.found.values(_W1, start, start + _STEP))
        self.found.release(_W1)

    def _check_finite(self, name: str, values: Floats) -> None:
        if not np.isfinite(values).all():
            raise self.found.fault(
                f"{name}: weights that are infinite or not a number", "the file is damaged; download it again"
            )


def weight_bytes(found: Checkpoint) -> int:
    """Bytes of what `ChainHeads` holds in float32: all but the matrices of a row for each token."""
    names = [name for name in found.tensors if name.startswith(("markov_head.", "confidence_head."))]
    return sum(4 * math.prod(found.shape(name)) for name in names if name not in (_W1, _W2))


class Chain:
    """One block's way through the heads: for each slot `latent` and `sure`, then `follow` its token."""

    def __init__(self, heads: ChainHeads, hidden: Floats, anchor: int) -> None:
        self._heads = heads
        self._depth = 0  # of the slot at hand, the anchor's included
        self._before = heads.embed(anchor)
        self._state = np.zeros(heads.rank, np.float32)
        # What the slots' states contribute is the larger part, and known at once.
        self._mixed = None if heads.mix is None else hidden @ heads.mix.hidden.T + heads.mix.bias
        self._sure = None if heads.sure is None else hidden @ heads.sure.hidden[0] + heads.sure.bias[0]
        if heads.first:
            self.latent()
            self._depth = heads.first

    def latent(self) -> Floats:
        """[rank] of this slot; call once for each."""
        if self._heads.mix is None or self._mixed is None:
            return self._before
        mix, mixed = self._heads.mix, self._mixed[self._depth] + self._heads.mix.before @ self._before
        if not mix.state.shape[1]:
            return _sigmoid(mixed) * self._before
        gate, candidate, out = np.split(mixed + mix.state @ self._state, 3)
        kept = _sigmoid(gate)
        self._state = kept * self._state + (np.float32(1) - kept) * np.tanh(candidate)
        return np.asarray(np.tanh(out), np.float32)

    def sure(self) -> float | None:
        """Chance that this slot's token is right, by the head for it; None without one."""
        if self._heads.sure is None or self._sure is None:
            return None
        z = float(self._sure[self._depth])
        if self._heads.sure.before.shape[1]:
            z += float(self._heads.sure.before[0] @ self._before)
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, z))))

    def follow(self, token: int) -> None:
        """The slot's token; go on to the next."""
        self._before = self._heads.embed(token)
        self._depth += 1


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1)), np.float32)
