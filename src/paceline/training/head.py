"""What all heads that are fitted have in common: batches in, a loss out, and a folder in a public layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.training.layers import Shape
from paceline.training.teacher import Teacher
from paceline.weights.safetensors import write_safetensors


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of texts, all of n tokens.

    Attributes:
        tokens: [B, n]
        counted: [B, n] whether the target wrote the token itself, so that guessing it is to be learnt.
        states: [B, n - 1, width] by layer: what entered it.
    """

    tokens: Tensor
    counted: Tensor
    states: Mapping[int, Tensor]


class Head(nn.Module):
    """A drafter that is fitted. Its parameters have the names of its layout.

    Args:
        teacher: the target.
        taps: layers of the target whose inputs it reads, ascending; the number of layers stands for what the
            final norm is given.

    Attributes:
        kind: as `drafters.checkpoint` calls it.
    """

    kind: str

    def __init__(self, teacher: Teacher, shape: Shape, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.teacher, self.shape, self.taps = teacher, shape, taps

    @property
    def needs(self) -> frozenset[int]:
        """Layers whose inputs its batches have: those it reads, and what the target's logits are made of."""
        return frozenset((*self.taps, self.teacher.depth))

    def loss(self, batch: Batch) -> Tensor:
        """What is to become small."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """config.json in its layout."""
        raise NotImplementedError

    def more(self) -> dict[str, NDArray[Any]]:
        """Tensors of its file that are not fitted."""
        return {}

    def save(self, folder: Path) -> Path:
        """Write its checkpoint, in half precision, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: value.numpy().astype(np.float16) for name, value in self.state_dict().items()}
        write_safetensors(folder / "model.safetensors", {**arrays, **self.more()})
        (folder / "config.json").write_text(json.dumps(self.settings(), indent=1) + "\n")
        return folder

    def layer_settings(self, model_type: str, layers: int) -> dict[str, Any]:
        """What config.json says about its layers in every layout."""
        return {
            "model_type": model_type,
            "hidden_size": self.shape.width,
            "intermediate_size": self.shape.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "rms_norm_eps": self.shape.eps,
            "rope_theta": self.shape.rope_base,
            "vocab_size": self.teacher.vocab_size,
            "max_position_embeddings": self.teacher.context_limit,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dtype": "float16",
        }


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """The mean of values that count, 0 where none does."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-9)


def cross_entropy(logits: Tensor, chances: Tensor) -> Tensor:
    """[...] of logits to a distribution, both [..., vocab]."""
    return -(chances * logits.log_softmax(dim=-1)).sum(dim=-1)
