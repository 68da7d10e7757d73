"""The decoder that all architectures share, recorded as native operations.

    x = embedding
    per layer:  x += o(attention(rope(qkv(norm(x)))))       then  x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

What varies is in `Architecture` and `DecoderConfig`. The list is recorded once; a pass runs all of it in one
native call.
"""

from __future__ import annotations

import math

from paceline.errors import ModelFileError
from paceline.models.config import DecoderConfig
from paceline.models.registry import architecture
from paceline.models.rope import Rope
from paceline.models.tensors import Tensors
from paceline.native import Program


def record(program: Program, tensors: Tensors, config: DecoderConfig, *, vocab: int, context: int) -> int:
    """Record a whole decoder. Tap i is what enters layer i; the last one is what the final norm sees.

    Args:
        vocab: rows of the embedding.
        context: positions of the longest text there can be.

    Returns:
        The handle of the matrix that makes logits.
    """
    decoder = Layers(program, tensors, config, context)
    scale = math.sqrt(config.width) if decoder.family.scaled_embedding else 1.0
    tensors.embed("token_embd.weight", vocab, config.width, decoder.x, scale)
    for layer in range(config.layers):
        program.tap(decoder.x)
        decoder.attention(layer)
        decoder.feed_forward(layer)
    program.tap(decoder.x)
    last = program.acts(config.width, wanted=True)
    decoder.norm("output_norm", last)
    head = "output.weight" if tensors.has("output.weight") else "token_embd.weight"
    matrix = tensors.matrix(head, vocab, config.width)
    program.head(last, matrix, config.logit_cap)
    return matrix


class Layers:
    """The buffers of a decoder, which all layers use in turn, and the two halves of a layer.

    Attributes:
        x: buffer of the residual stream.
        normed: activations that a layer's matrices read.
    """

    def __init__(self, program: Program, tensors: Tensors, config: DecoderConfig, context: int) -> None:
        self.program, self.tensors, self.config = program, tensors, config
        self.family = architecture(config.architecture)
        self.inner, self.kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.x, self.q, self.out = (program.buffer(w) for w in (config.width, self.inner, self.inner))
        self.k, self.v = program.buffer(self.kv_width), program.buffer(self.kv_width)
        self.normed, self.attended = program.acts(config.width), program.acts(self.inner)
        self.activated = program.acts(config.hidden)
        self.mixture, self.scores = self._mixture()
        self.side = program.buffer(config.width) if self.family.post_norms else -1
        self._context = context
        self.turn()

    def turn(self) -> None:
        """Record the angles of the rows; each part of a program needs its own."""
        self.angles = {
            rope: self.program.angles(
                rope.frequencies(self._context, _divisors(self.tensors, rope, self._context)), rope.scale
            )
            for rope in dict.fromkeys((self.config.rope, self.config.local_rope))
        }

    def norm(self, name: str, out: int) -> None:
        gamma = self.tensors.vector(name + ".weight", self.config.width)
        self.program.norm(self.x, gamma, self.config.norm_eps, out)

    def attention(self, layer: int) -> None:
        """Record x += o(attention(norm(x))) of one layer."""
        self.norm(f"blk.{layer}.attn_norm", self.normed)
        self.attend(layer, self.normed, self.config.width)

    def attend(self, layer: int, source: int, width: int) -> None:
        """Record x += o(attention(...)) of activations of this width, whatever they were made of."""
        config, name, window = self.config, f"blk.{layer}.", self.config.windows[layer]
        weights, biases = self._projections(name, width)
        self.program.linear(source, weights, biases, [self.q, self.k, self.v])
        self.program.rope(
            layer,
            self.q,
            self.k,
            self.v,
            self.angles[config.local_rope if window else config.rope],
            self.family.interleaved,
            config.query_scale,
            self._head_gamma(name + "attn_q_norm"),
            self._head_gamma(name + "attn_k_norm"),
            config.norm_eps,
        )
        self.program.attention(layer, self.q, self.out, window, config.attention_cap)
        self.program.quantize(self.out, self.attended)
        self._add(self.attended, name + "attn_output", self.inner, name + "post_attention_norm")

    def file(self, layer: int, source: int, width: int) -> None:
        """Record that a layer's keys and values are made of these activations and filed; nobody looks."""
        config, name = self.config, f"blk.{layer}."
        weights, biases = self._projections(name, width)
        self.program.linear(source, weights[1:], biases[1:], [self.k, self.v])
        self.program.rope(
            layer,
            -1,
            self.k,
            self.v,
            self.angles[config.local_rope if config.windows[layer] else config.rope],
            self.family.interleaved,
            config.query_scale,
            k_gamma=self._head_gamma(name + "attn_k_norm"),
            eps=config.norm_eps,
        )

    def feed_forward(self, layer: int) -> None:
        """Record x += down(activation(gate(...)) * up(...)) of one layer, or its mixture of experts."""
        name = f"blk.{layer}."
        if self.tensors.has(name + "ffn_gate_inp.weight"):
            self._experts(name)
            return
        self.norm(name + "ffn_norm", self.normed)
        size, width = self.config.hidden, self.config.width
        if self.family.fused:
            gate, up = self.tensors.split(name + "ffn_up.weight", [size, size], width)
        else:
            gate = self.tensors.matrix(name + "ffn_gate.weight", size, width)
            up = self.tensors.matrix(name + "ffn_up.weight", size, width)
        self.program.gated(self.normed, gate, up, self.activated, self.family.gelu)
        self._add(self.activated, name + "ffn_down", size, name + "post_ffw_norm")

    def _mixture(self) -> tuple[int, int]:
        """Handles of the room for experts and of their scores."""
        experts = self.config.experts
        if experts is None:
            return -1, -1
        mixture = self.program.mixture(
            experts=experts.count,
            used=experts.used,
            normalised=experts.normalised,
            width=self.config.width,
            hidden=experts.hidden,
        )
        return mixture, self.program.buffer(experts.count)

    def _experts(self, name: str) -> None:
        """Record the router, and that those it chooses are added to x."""
        experts, width, eps = self.config.experts, self.config.width, self.config.norm_eps
        if experts is None:
            raise ModelFileError(f"{name}ffn_gate_inp.weight routes to no experts", "the file is damaged")
        gamma = self.tensors.vector(name + "ffn_norm.weight", width)
        self.program.norm(self.x, gamma, eps, self.normed)
        router = self.tensors.matrix(name + "ffn_gate_inp.weight", experts.count, width)
        self.program.linear(self.normed, [router], [-1], [self.scores])
        gate, up = (
            self.tensors.experts(f"{name}ffn_{part}_exps.weight", experts.count, experts.hidden, width)
            for part in ("gate", "up")
        )
        down = self.tensors.experts(name + "ffn_down_exps.weight", experts.count, width, experts.hidden)
        self.program.experts(self.mixture, self.scores, self.x, gamma, eps, gate, up, down)

    def _projections(self, name: str, width: int) -> tuple[list[int], list[int]]:
        """Weights and biases of query, key and value."""
        sizes = [self.inner, self.kv_width, self.kv_width]
        if self.family.fused:
            return self.tensors.split(name + "attn_qkv.weight", sizes, width), [-1, -1, -1]
        named = [(f"{name}attn_{part}", size) for part, size in zip("qkv", sizes, strict=True)]
        return (
            [self.tensors.matrix(part + ".weight", size, width) for part, size in named],
            [self.tensors.bias(part + ".bias", size) for part, size in named],
        )

    def _head_gamma(self, name: str) -> int:
        return self.tensors.vector(name + ".weight", self.config.head_dim) if self.family.head_norm else -1

    def _add(self, source: int, matrix: str, cols: int, post_norm: str) -> None:
        """Record x += matrix . source, through a norm where the architecture has one."""
        width = self.config.width
        weight = self.tensors.matrix(matrix + ".weight", width, cols)
        bias = self.tensors.bias(matrix + ".bias", width)
        if not self.family.post_norms:
            self.program.linear(source, [weight], [bias], [self.x], add=True)
            return
        self.program.linear(source, [weight], [bias], [self.side])
        gamma = self.tensors.vector(post_norm + ".weight", width)
        self.program.float_norm(self.side, gamma, self.config.norm_eps, self.x, add=True)


def _divisors(tensors: Tensors, rope: Rope, context: int) -> list[float] | None:
    """What the file divides the frequencies by: for all lengths (Llama 3), or for short and long contexts."""
    name = "rope_freqs.weight"
    if rope.kind == "longrope" or tensors.has("rope_factors_long.weight"):
        names = ["rope_factors_short.weight", "rope_factors_long.weight"]
        short, long = (_divisor(tensors, name, rope) for name in names)
        return long if context > rope.original else short
    return _divisor(tensors, name, rope) if tensors.has(name) else None


def _divisor(tensors: Tensors, name: str, rope: Rope) -> list[float]:
    factors = tensors.values(name, rope.dim // 2)
    if not (factors > 0).all():
        raise ModelFileError(f"{name} holds values that are not positive", "the file is damaged")
    return [float(f) for f in factors]
