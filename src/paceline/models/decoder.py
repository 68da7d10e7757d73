"""The dense decoder that Llama and its kin share, recorded as native operations.

    x = embedding
    per layer:  x += o(attention(rope(qkv(norm(x)))))       then  x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

The list is recorded once; a pass runs all of it in one native call.
"""

from __future__ import annotations

import math

from paceline.errors import ModelFileError
from paceline.models.config import DecoderConfig
from paceline.models.tensors import Tensors
from paceline.native import Program


def record(
    program: Program, tensors: Tensors, config: DecoderConfig, *, vocab: int, interleaved: bool
) -> None:
    """Record a whole decoder.

    Args:
        vocab: rows of the embedding.
        interleaved: rope turns pairs (2i, 2i+1), as converters store Llama; else (i, i + half).
    """
    width, inner = config.width, config.heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    x, q, out = program.buffer(width), program.buffer(inner), program.buffer(inner)
    k, v = program.buffer(kv_width), program.buffer(kv_width)
    normed, attended, activated = program.acts(width), program.acts(inner), program.acts(config.hidden)

    tensors.embed("token_embd.weight", vocab, width, x)
    angles = program.angles(config.rope_frequencies(_rope_factors(tensors, config)))
    for i in range(config.layers):
        name = f"blk.{i}."
        program.norm(x, tensors.vector(name + "attn_norm.weight", width), config.norm_eps, normed)
        projections = [("attn_q", inner), ("attn_k", kv_width), ("attn_v", kv_width)]
        program.linear(
            normed,
            [tensors.matrix(f"{name}{p}.weight", size, width) for p, size in projections],
            [tensors.bias(f"{name}{p}.bias", size) for p, size in projections],
            [q, k, v],
        )
        program.rope(i, q, k, v, angles, interleaved, 1.0 / math.sqrt(config.head_dim))
        program.attention(i, q, out)
        program.quantize(out, attended)
        output = tensors.matrix(name + "attn_output.weight", width, inner)
        program.linear(attended, [output], [tensors.bias(name + "attn_output.bias", width)], [x], add=True)

        program.norm(x, tensors.vector(name + "ffn_norm.weight", width), config.norm_eps, normed)
        gate = tensors.matrix(name + "ffn_gate.weight", config.hidden, width)
        up = tensors.matrix(name + "ffn_up.weight", config.hidden, width)
        program.swiglu(normed, gate, up, activated)
        down = tensors.matrix(name + "ffn_down.weight", width, config.hidden)
        program.linear(activated, [down], [-1], [x], add=True)

    last = program.acts(width, wanted=True)
    program.norm(x, tensors.vector("output_norm.weight", width), config.norm_eps, last)
    head = "output.weight" if tensors.has("output.weight") else "token_embd.weight"
    program.head(last, tensors.matrix(head, vocab, width))


def _rope_factors(tensors: Tensors, config: DecoderConfig) -> list[float] | None:
    """Llama 3's stretched rope comes as one divisor per rotating pair."""
    if not tensors.has("rope_freqs.weight"):
        return None
    factors = tensors.values("rope_freqs.weight", config.rope_dim // 2)
    if not (factors > 0).all():
        raise ModelFileError("rope_freqs.weight holds values that are not positive", "the file is damaged")
    return [float(f) for f in factors]
