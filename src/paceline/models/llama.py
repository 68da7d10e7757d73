"""Llama, and what converters store under its name: Llama 2 and 3, Mistral, SmolLM2."""

from __future__ import annotations

from paceline.models import decoder
from paceline.models.config import DecoderConfig
from paceline.models.tensors import Tensors
from paceline.native import Program


def record(program: Program, tensors: Tensors, config: DecoderConfig, vocab: int) -> None:
    """Record the model; its query and key rows come permuted for interleaved rope."""
    decoder.record(program, tensors, config, vocab=vocab, interleaved=True)
