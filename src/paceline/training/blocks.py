"""Heads that fill a block of masks: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Blocks behind anchors drawn at random share a pass over their text: each sees what the target made of the
tokens before its anchor, and all of itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.training.head import Batch, Head, weighted_mean
from paceline.training.layers import Attention, Layer, Shape, scale
from paceline.training.teacher import Teacher


@dataclass(frozen=True, slots=True)
class Guesses:
    """S slots of A blocks that guess.

    Attributes:
        hidden: [B, A, S, width] what they lead to.
        labels, before: [B, A, S] the tokens to be guessed, and those before them.
        true: [B, A, S, width] the target's states that the tokens were drawn from, before its final norm.
    """

    hidden: Tensor
    labels: Tensor
    before: Tensor
    true: Tensor


class DFlash(Head):
    """A block drafter in z-lab's layout: slot k guesses the token at its own place, the anchor's nothing.

    Args:
        block: slots of a block, the anchor among them.
        mask: id that fills the others; one that no text has.
        anchors: blocks per text and batch.
        decay: slots further along weigh less: by exp(-k / decay).
    """

    kind = "dflash"
    anchor_first = False

    def __init__(
        self,
        teacher: Teacher,
        shape: Shape,
        taps: tuple[int, ...],
        *,
        mask: int,
        layers: int = 2,
        block: int = 8,
        anchors: int = 16,
        decay: float = 4.0,
    ) -> None:
        super().__init__(teacher, shape, taps)
        self.mask, self.block, self.anchors, self.decay = mask, block, anchors, decay
        self.fc = nn.Linear(len(taps) * teacher.config.width, shape.width, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.width, shape.eps)
        self.layers = nn.ModuleList([Layer(shape, head_norms=True) for _ in range(layers)])
        self.norm = teacher.norm()

    @property
    def slots(self) -> Tensor:
        """The slots that guess."""
        return torch.arange(0 if self.anchor_first else 1, self.block)

    def loss(self, batch: Batch) -> Tensor:
        at = self.draw(batch)
        places = at[..., None] + self.slots + self.anchor_first  # of the tokens to be guessed
        guesses = Guesses(
            self.hidden(batch, at)[:, :, self.slots],
            gathered(batch.tokens, places),
            gathered(batch.tokens, places - 1),
            gathered(batch.states[self.teacher.depth], places - 1),
        )
        counted = gathered(batch.counted, places).cumprod(dim=2)
        weights = torch.exp(-torch.arange(len(self.slots)) / self.decay) * counted
        return weighted_mean(self.compare(guesses), weights)

    def compare(self, guesses: Guesses) -> Tensor:
        """[B, A, S] losses."""
        logits = self.teacher.output(guesses.hidden)
        return functional.cross_entropy(logits.movedim(3, 1), guesses.labels, reduction="none")

    def draw(self, batch: Batch) -> Tensor:
        """[B, A] where blocks begin, such that they end within the text; 0 has nothing before it."""
        last = batch.tokens.shape[1] - self.block - self.anchor_first
        return torch.randint(1, last + 1, (len(batch.tokens), self.anchors))

    def hidden(self, batch: Batch, at: Tensor) -> Tensor:
        """[B, A, block, width] what the slots of the blocks at these anchors lead to."""
        context = self.hidden_norm(self.fc(torch.cat([batch.states[tap] for tap in self.taps], dim=2)))
        count = context.shape[1]
        tokens = torch.full((*at.shape, self.block), self.mask)
        tokens[..., 0] = gathered(batch.tokens, at)
        positions = (at[..., None] + torch.arange(self.block)).flatten(1)
        owner = torch.arange(at.shape[1]).repeat_interleave(self.block)
        before = torch.arange(count) < at.repeat_interleave(self.block, dim=1)[..., None]
        own = (owner[:, None] == owner).expand(len(at), -1, -1)
        seen = torch.cat([before, own], dim=2)[:, None]
        x = self.teacher.embed(tokens).flatten(1, 2)
        for layer in self.layers:
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), positions, context, seen)
            x = layer.feed_forward(x)
        return self.norm(x).unflatten(1, (-1, self.block))

    def _attend(
        self, attention: Attention, x: Tensor, positions: Tensor, context: Tensor, seen: Tensor
    ) -> Tensor:
        q = attention.queries(x, positions)
        filed, own = attention.keys(context, torch.arange(context.shape[1])), attention.keys(x, positions)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(filed, own, strict=True))
        scores = (q @ keys.transpose(2, 3) * scale(q)).masked_fill(~seen, -torch.inf)
        return attention.out(scores.softmax(dim=3) @ values)

    def settings(self) -> dict[str, Any]:
        return {
            "architectures": ["DFlashDraftModel"],
            **self.layer_settings("qwen3", len(self.layers)),
            "layer_types": ["full_attention"] * len(self.layers),
            "block_size": self.block,
            "num_target_layers": self.teacher.depth,
            "dflash_config": self.inner_settings(),
        }

    def inner_settings(self) -> dict[str, Any]:
        """What is its own in config.json; layers are counted by their outputs."""
        return {"mask_token_id": self.mask, "target_layer_ids": [tap - 1 for tap in self.taps]}


class DSpark(DFlash):
    """DFlash with a vanilla Markov head and a confidence head, in SpecForge's layout.

    Slot k guesses the token behind it, the anchor's slot too.

    Args:
        rank: of the Markov head.
        block, more: see `DFlash`.
    """

    kind = "dspark"
    anchor_first = True

    def __init__(
        self,
        teacher: Teacher,
        shape: Shape,
        taps: tuple[int, ...],
        *,
        mask: int,
        rank: int = 32,
        block: int = 7,
        **more: Any,
    ) -> None:
        super().__init__(teacher, shape, taps, mask=mask, block=block, **more)
        vocab = teacher.vocab_size
        self.rank = rank
        self.markov_head = nn.Module()
        self.markov_head.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_head.markov_w2 = nn.Linear(rank, vocab, bias=False)
        self.confidence_head = nn.Module()
        self.confidence_head.proj = nn.Linear(shape.width + rank, 1)

    def compare(self, guesses: Guesses) -> Tensor:
        """0.1 of the cross entropy, 0.9 of the distance between distributions, and the confidence's own."""
        before = self.markov_head.markov_w1(guesses.before)
        logits = self.teacher.output(guesses.hidden) + self.markov_head.markov_w2(before)
        chances = self.teacher.output(self.teacher.normed(guesses.true)).softmax(dim=3)
        distance = (logits.softmax(dim=3) - chances).abs().sum(dim=3)
        taken = (1.0 - 0.5 * distance).detach()  # the chance that a guess is taken
        sure = self.confidence_head.proj(torch.cat([guesses.hidden, before], dim=3))[..., 0]
        loss = 0.1 * functional.cross_entropy(logits.movedim(3, 1), guesses.labels, reduction="none")
        loss = loss + 0.9 * distance
        return loss + functional.binary_cross_entropy_with_logits(sure, taken, reduction="none")

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"architectures": ["DSparkDraftModel"]}

    def inner_settings(self) -> dict[str, Any]:
        return {
            **super().inner_settings(),
            "block_size": self.block,
            "attention_mode": "gqa",
            "projector_type": "dspark",
            "markov_rank": self.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "confidence_head_alpha": 1.0,
        }


def gathered(values: Tensor, places: Tensor) -> Tensor:
    """[B, ..., *] of values [B, n, *] at places [B, ...]."""
    rows = torch.arange(len(values)).reshape(-1, *[1] * (places.dim() - 1))
    return values[rows, places]
