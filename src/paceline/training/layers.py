"""A decoder layer's parts, under the names that checkpoints give them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a head's layers.

    Attributes:
        hidden: width of the feed-forward network.
        rope_base: the lower, the more does a step in the text turn.
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_base: float = 10000.0

    @classmethod
    def of(cls, config: DecoderConfig) -> Shape:
        """Those of the target's own layers."""
        return cls(
            width=config.width,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
        )


class Attention(nn.Module):
    """Projections of an attention with rotary positions; who sees whom is the caller's business.

    Args:
        reads: width of what it reads.
        head_norms: queries and keys are normalised, head by head.
    """

    def __init__(self, shape: Shape, reads: int, *, head_norms: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(reads, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(reads, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(reads, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.eps) if head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.eps) if head_norms else nn.Identity()

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, heads, n, head_dim] of x [B, n, reads] at positions [n] or [B, n]."""
        return self._turned(self.q_norm(self._heads(self.q_proj(x))), positions)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, n, head_dim], repeated for the queries that share them."""
        keys = self._turned(self.k_norm(self._heads(self.k_proj(x))), positions)
        values = self._heads(self.v_proj(x))
        group = self.shape.heads // self.shape.kv_heads
        return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)

    def out(self, mixed: Tensor) -> Tensor:
        """[B, n, width] of what the heads have mixed [B, heads, n, head_dim]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.shape.head_dim)).transpose(1, 2)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn the halves of each head [B, heads, n, head_dim] by position."""
        half = self.shape.head_dim // 2
        angles = positions[..., None] * self.shape.rope_base ** (-torch.arange(half) / half)
        if angles.dim() == 3:
            angles = angles[:, None]
        one, other = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class Mlp(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """What a layer holds; how it is put together differs from head to head.

    Args:
        reads: width of what its attention reads; None means the layer's own.
        first_norm: whether there is a norm before the attention.
    """

    def __init__(
        self, shape: Shape, *, reads: int | None = None, first_norm: bool = True, head_norms: bool = False
    ) -> None:
        super().__init__()
        if first_norm:
            self.input_layernorm = nn.RMSNorm(shape.width, shape.eps)
        self.self_attn = Attention(shape, reads or shape.width, head_norms=head_norms)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.eps)
        self.mlp = Mlp(shape)

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


def scale(q: Tensor) -> float:
    """What scores of these queries are multiplied by."""
    return 1.0 / math.sqrt(q.shape[-1])
