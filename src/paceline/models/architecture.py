"""What sets one decoder apart from the next, as far as its metadata does not say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family of decoders; the defaults describe the plain one.

    Attributes:
        interleaved: rope turns dimensions (2i, 2i + 1) of a head together, else (i, i + half).
        head_norm: each query and key head is normalised before it is turned.
        fused: one matrix holds query, key and value, and one gate and up.
        gelu: the gate's activation is gelu in its form with tanh, else silu.
        post_norms: what attention and the feed-forward network return is normalised before it is added.
        scaled_embedding: embeddings are multiplied by the square root of their width.
        window_period: where the model has a sliding window, every layer whose number (from 1) this divides
            sees the whole text all the same; 0 means none does. A file may say otherwise.
        local_rope_base: base of the rope in layers with a window; None means that of all layers.
        wide_scale_layers: the model of this many layers divides its scores by the square root of
            width / heads, all others by that of the head size.
    """

    interleaved: bool = False
    head_norm: bool = False
    fused: bool = False
    gelu: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    window_period: int = 0
    local_rope_base: float | None = None
    wide_scale_layers: int | None = None
