"""Files of a tiny target and draft models for it, each with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.gguf_writer import write_gguf
from support.tiny_models import TinyModel
from support.tiny_tokenizer import VOCAB_SIZE
from support.tiny_tokenizer import metadata as tiny_metadata


def write_model(path: Path, tokenizer: dict[str, Any] | None = None, **model: Any) -> Path:
    """Write a random model with the tiny tokenizer, or another of the same size."""
    tiny = TinyModel(**{"vocab": VOCAB_SIZE, "tied": False, **model})
    return write_gguf(path, tiny.metadata() | (tokenizer or tiny_metadata()), tiny.tensors())
