"""Heads that make one row per token: EAGLE-1 and 2, EAGLE-3, MTP.

Row t pairs the embedding of token t + 1 with what the target made of token t, and guesses token t + 2. From
its own guess a head goes on with its own states. That is rehearsed (training-time test, arXiv 2503.01840):
step j of every row reads the true token j places further, the state that step j - 1 of the row led to, and
the keys of all rows up to its own as step 0 made them, and of its own row as the steps since did, each at its
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from paceline.training.head import Batch, Head, cross_entropy, weighted_mean
from paceline.training.layers import Attention, Layer, Shape, scale
from paceline.training.teacher import Teacher

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values of every step so far."""


class RowHead(Head):
    """Base of the heads here.

    Args:
        steps: how many tokens of a draft are rehearsed.
        decay: weight of each step's loss over that of the one before.
    """

    def __init__(
        self, teacher: Teacher, shape: Shape, taps: tuple[int, ...], *, steps: int, decay: float
    ) -> None:
        super().__init__(teacher, shape, taps)
        self.steps = steps
        self.shares = [decay**j / sum(decay**i for i in range(steps)) for j in range(steps)]

    def loss(self, batch: Batch) -> Tensor:
        rows = batch.tokens.shape[1] - 1 - self.steps
        given = self.fuse([batch.states[tap][:, :rows] for tap in self.taps])
        memory: Memory = []
        total = torch.zeros(())
        for j, share in enumerate(self.shares):
            embedded = self.teacher.embed(batch.tokens[:, 1 + j : 1 + j + rows])
            made = self.row(embedded, given, memory)
            behind = slice(2 + j, 2 + j + rows)
            true = batch.states[self.teacher.depth][:, 1 + j : 1 + j + rows]
            loss, counts = self.compare(made, self.teacher.normed(true))
            total = total + share * weighted_mean(loss, counts * batch.counted[:, behind])
            given = self.onward(made)
        return total

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """[B, n, width] what rows start from, of the target's states."""
        raise NotImplementedError

    def row(self, embedded: Tensor, given: Tensor, memory: Memory) -> Tensor:
        """[B, n, width] what a step makes of its rows; adds its keys to the memory."""
        raise NotImplementedError

    def compare(self, made: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [B, n] of rows, and how much each counts.

        Args:
            true: [B, n, width] the target's states after its final norm: what it makes tokens of where the
                head is to guess.
        """
        raise NotImplementedError

    def onward(self, made: Tensor) -> Tensor:
        """What the next step starts from."""
        return made


class Eagle(RowHead):
    """EAGLE-1 and 2 (arXiv 2401.15077): SafeAILab's layout, objective and noise; with more steps
    than one as in HASS (arXiv 2408.15766)."""

    kind = "eagle"

    def __init__(self, teacher: Teacher, shape: Shape, *, steps: int = 3) -> None:
        super().__init__(teacher, shape, (teacher.depth,), steps=steps, decay=1.0)
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.layers = nn.ModuleList([Layer(shape, first_norm=False)])

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        given = self.teacher.normed(states[0])
        return given + 0.2 * (torch.rand_like(given) - 0.5)

    def row(self, embedded: Tensor, given: Tensor, memory: Memory) -> Tensor:
        x = self.fc(torch.cat([embedded, given], dim=2))
        layer = self.layers[0]
        return layer.feed_forward(x + attend(layer.self_attn, x, memory))

    def compare(self, made: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        state = functional.smooth_l1_loss(made, true, reduction="none").mean(dim=2)
        chances = self.teacher.output(true).softmax(dim=2)
        return state + 0.1 * cross_entropy(self.teacher.output(made), chances), torch.ones(())

    def settings(self) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLM"], "bias": False} | self.layer_settings("llama", 1)

    def more(self) -> dict[str, NDArray[Any]]:
        return {"embed_tokens.weight": self.teacher.embedding.numpy().astype(np.float16)}


class Eagle3(RowHead):
    """EAGLE-3 (arXiv 2503.01840) in SpecForge's layout.

    Args:
        kept: ids of the target that it drafts, ascending.
    """

    kind = "eagle3"

    def __init__(
        self,
        teacher: Teacher,
        shape: Shape,
        taps: tuple[int, ...],
        kept: Sequence[int],
        *,
        steps: int = 3,
    ) -> None:
        super().__init__(teacher, shape, taps, steps=steps, decay=0.8)
        self.kept = torch.tensor(kept)
        self.fc = nn.Linear(len(taps) * teacher.config.width, shape.width, bias=False)
        self.midlayer = Layer(shape, reads=2 * shape.width)
        self.midlayer.hidden_norm = nn.RMSNorm(shape.width, shape.eps)
        self.norm = teacher.norm()
        self.lm_head = nn.Linear(shape.width, len(kept), bias=False)
        self.lm_head.weight.data.copy_(teacher.head[self.kept])

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        return self.fc(torch.cat(list(states), dim=2))

    def row(self, embedded: Tensor, given: Tensor, memory: Memory) -> Tensor:
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(given)], dim=2)
        return layer.feed_forward(given + attend(layer.self_attn, both, memory))

    def compare(self, made: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.teacher.output(true)
        counts = torch.isin(logits.argmax(dim=2), self.kept)
        chances = logits[..., self.kept].softmax(dim=2)
        return cross_entropy(self.lm_head(self.norm(made)), chances), counts

    def settings(self) -> dict[str, Any]:
        outputs = [tap - 1 for tap in self.taps]
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.layer_settings("llama", 1),
            "draft_vocab_size": len(self.kept),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True},
        }

    def more(self) -> dict[str, NDArray[Any]]:
        kept = self.kept.numpy()
        marks = np.isin(np.arange(self.teacher.vocab_size), kept)
        return {"d2t": kept - np.arange(len(kept)), "t2d": marks}


class Mtp(RowHead):
    """One MTP head that is used for several steps (FastMTP, arXiv 2509.18362), in speculators' layout."""

    kind = "mtp"

    def __init__(self, teacher: Teacher, shape: Shape, *, steps: int = 3) -> None:
        super().__init__(teacher, shape, (teacher.depth,), steps=steps, decay=0.6)
        layer = Layer(shape)
        layer.token_layernorm = nn.RMSNorm(shape.width, shape.eps)
        layer.hidden_layernorm = nn.RMSNorm(shape.width, shape.eps)
        layer.input_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        layer.final_layernorm = teacher.norm()
        self.mtp_layers = nn.ModuleList([layer])

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        return self.teacher.normed(states[0])

    def row(self, embedded: Tensor, given: Tensor, memory: Memory) -> Tensor:
        layer = self.mtp_layers[0]
        both = torch.cat([layer.token_layernorm(embedded), layer.hidden_layernorm(given)], dim=2)
        x = layer.input_proj(both)
        x = layer.feed_forward(x + attend(layer.self_attn, layer.input_layernorm(x), memory))
        return layer.final_layernorm(x)

    def compare(self, made: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.teacher.output(true).softmax(dim=2)
        return cross_entropy(self.teacher.output(made), chances), torch.ones(())

    def settings(self) -> dict[str, Any]:
        return {
            "architectures": ["MTPSpeculator"],
            "speculators_model_type": "mtp",
            "transformer_layer_config": self.layer_settings("llama", 1),
            "num_nextn_predict_layers": 1,
        }


def attend(attention: Attention, x: Tensor, memory: Memory) -> Tensor:
    """Attention of step j over rows x [B, n, reads]: see the module. Adds the step's keys to the memory."""
    rows = x.shape[1]
    positions = torch.arange(rows) + len(memory)
    q = attention.queries(x, positions)
    memory.append(attention.keys(x, positions))
    keys, values = memory[0]
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    scores = [(q @ keys.transpose(2, 3)).masked_fill(later, -torch.inf)]
    scores += [(q * k).sum(dim=3, keepdim=True) for k, _ in memory[1:]]
    shares = (torch.cat(scores, dim=3) * scale(q)).softmax(dim=3)
    mixed = shares[..., :rows] @ values
    for i, (_, v) in enumerate(memory[1:]):
        mixed = mixed + shares[..., rows + i, None] * v
    return attention.out(mixed)
