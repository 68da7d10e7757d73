"""What a target lends to the fitting of its drafters, as tensors of torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core import Target
from paceline.drafters.head_program import Lender
from paceline.errors import UsageError
from paceline.models.config import DecoderConfig
from paceline.models.registry import architecture
from paceline.weights.quants import dequantize
from paceline.weights.source import Source


class Teacher:
    """Embedding, final norm and output matrix of a target. Nothing of it is trained.

    Args:
        target: a model that runs here.

    Attributes:
        embedding: [vocab, width] as the first layer is given it.
        head: [vocab, width] the matrix that makes logits.
        final_norm: [width]

    Raises:
        UsageError: the target lends no weights.
    """

    def __init__(self, target: Target) -> None:
        if getattr(target, "lent", None) is None:
            raise UsageError("this target lends no weights to a head", "fit heads to models that run here")
        lender: Lender = target  # type: ignore[assignment]
        lent = lender.lent
        self.config: DecoderConfig = lent.config
        self.context_limit = lender.context_limit
        table = _matrix(lent.file, "token_embd.weight")
        scaled = architecture(self.config.architecture).scaled_embedding
        self.embedding = table * math.sqrt(self.config.width) if scaled else table
        self.head = _matrix(lent.file, "output.weight") if "output.weight" in lent.file.tensors else table
        self.final_norm = torch.from_numpy(lent.final_norm.copy())

    @property
    def depth(self) -> int:
        """Layers of the target; as a tap, what its final norm is given."""
        return self.config.layers

    @property
    def vocab_size(self) -> int:
        return len(self.embedding)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def normed(self, states: Tensor) -> Tensor:
        """States behind the last layer, after the final norm."""
        return functional.rms_norm(states, self.final_norm.shape, self.final_norm, self.config.norm_eps)

    def norm(self) -> nn.RMSNorm:
        """A copy of its final norm, for a head to begin with."""
        norm = nn.RMSNorm(self.final_norm.shape, self.config.norm_eps)
        norm.weight.data.copy_(self.final_norm)
        return norm

    def output(self, normed: Tensor) -> Tensor:
        """[..., vocab] logits of states after the final norm, or of what takes their place."""
        logits, cap = normed @ self.head.T, self.config.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits


def _matrix(file: Source, name: str) -> Tensor:
    info = file.tensors[name]
    return torch.from_numpy(dequantize(info.type, file.data(name), info.shape).copy())
