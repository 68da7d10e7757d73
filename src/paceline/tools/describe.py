"""What a model file holds, without loading it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.drafters.beside import find_drafters
from paceline.errors import PacelineError
from paceline.models.config import DecoderConfig
from paceline.models.memory import CacheNeeds
from paceline.weights.source import open_model

KV_BYTES = 2
"""The KV cache holds 16-bit floats."""


@dataclass(frozen=True, slots=True)
class Description:
    """Attributes:
    tensor_bytes: bytes of weights by tensor type, largest first.
    kv_bytes_per_token: what one token of context takes in the KV cache.
    window: of how many tokens at the end the layers with a sliding window keep theirs; 0 if there are none.
    window_bytes_per_token: how much of it is theirs.
    drafters: what was found in the model's files or near them that drafts for it, and what does not and why.
    """

    file: str
    bytes: int
    name: str
    license: str
    architecture: str
    parameters: int
    tensors: int
    tensor_bytes: dict[str, int]
    layers: int
    width: int
    heads: int
    kv_heads: int
    context_length: int
    kv_bytes_per_token: int
    window: int
    window_bytes_per_token: int
    tokenizer: str
    pre_tokenizer: str
    vocabulary: int
    chat_template: str | None
    drafters: list[str]

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(self.tensor_bytes.values()) / max(self.parameters, 1)


def describe(path: Path) -> Description:
    """Read the header of a file or folder. Raises ModelFileError for a damaged one."""
    with open_model(path) as file:
        meta = file.metadata
        arch = str(meta.get("general.architecture", ""))
        sizes: Counter[str] = Counter()
        parameters = 0
        for tensor in file.tensors.values():
            sizes[tensor.type.name] += tensor.nbytes
            count = 1
            for side in tensor.shape:
                count *= side
            parameters += count
        layers, heads = _number(meta, arch, "block_count"), _number(meta, arch, "attention.head_count")
        kv_heads = _number(meta, arch, "attention.head_count_kv") or heads
        width = _number(meta, arch, "embedding_length")
        head_size = _number(meta, arch, "attention.key_length") or width // max(heads, 1)
        cache = _cache(meta) or CacheNeeds(2 * layers * kv_heads * head_size * KV_BYTES)
        return Description(
            file=str(path),
            bytes=file.nbytes,
            name=str(meta.get("general.name", "")),
            license=str(meta.get("general.license", "")),
            architecture=arch,
            parameters=parameters,
            tensors=len(file.tensors),
            tensor_bytes=dict(sizes.most_common()),
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            context_length=_number(meta, arch, "context_length"),
            kv_bytes_per_token=cache.per_token + cache.window_per_token,
            window=cache.window,
            window_bytes_per_token=cache.window_per_token,
            tokenizer=str(meta.get("tokenizer.ggml.model", "")),
            pre_tokenizer=str(meta.get("tokenizer.ggml.pre", "")),
            vocabulary=len(meta.get("tokenizer.ggml.tokens") or ()),
            chat_template=meta.get("tokenizer.chat_template"),
            drafters=[found.describe(path) for found in find_drafters(file)],
        )


def _cache(meta: dict[str, Any]) -> CacheNeeds | None:
    """What the cache takes, if the model is one that runs."""
    try:
        return CacheNeeds.of(DecoderConfig.from_metadata(meta))
    except (PacelineError, KeyError):
        return None


def _number(meta: dict[str, Any], arch: str, key: str) -> int:
    """A whole number of the architecture's metadata, 0 when absent; the largest where every layer has one."""
    value = meta.get(f"{arch}.{key}", 0)
    if isinstance(value, list):
        value = max(value, default=0)
    return value if isinstance(value, int) else 0
