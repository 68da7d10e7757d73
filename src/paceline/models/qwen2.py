"""Qwen 2 and 2.5: Llama with biases on query, key and value, and rope over two halves."""

from __future__ import annotations

from paceline.models import decoder
from paceline.models.config import DecoderConfig
from paceline.models.tensors import Tensors
from paceline.native import Program


def record(program: Program, tensors: Tensors, config: DecoderConfig, vocab: int) -> None:
    """Record the model."""
    decoder.record(program, tensors, config, vocab=vocab, interleaved=False)
