"""Writes `tests/text/recorded/`: what the reference tokenizers make of the corpus.

    python -m oracles.record_text MODELS     (in tests/, with the oracle environment)

MODELS is a folder with smollm2.gguf. Byte-level ids are llama.cpp's, for the model's own vocabulary
under each pre-tokenizer's name. SentencePiece ids are the sentencepiece library's, for small
vocabularies trained here on the corpus, which are recorded too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oracles.text_references import (
    SENTENCEPIECES,
    llama_server,
    sentencepiece_metadata,
    tiny_llama,
    train_sentencepiece,
)
from paceline.weights.gguf import GGUFFile
from support.text_corpus import corpus, digest

PRE_TOKENIZERS = ("smollm", "gpt-2", "qwen2", "llama-bpe", "default")
_IN_FULL = 16
_RECORDED = Path(__file__).parents[1] / "text" / "recorded"


def tokenizer_metadata(model: Path) -> dict[str, Any]:
    """Return the `tokenizer.*` keys of a GGUF file."""
    with_all = GGUFFile.open(model)
    try:
        return {key: value for key, value in with_all.metadata.items() if key.startswith("tokenizer.")}
    finally:
        with_all.close()


def record(encode: Callable[[str], list[int]], texts: list[str]) -> dict[str, Any]:
    """Return every text's digest, and some texts' ids in full."""
    ids = [encode(text) for text in texts]
    return {"digests": " ".join(map(digest, ids)), "full": {str(i): ids[i] for i in range(1, _IN_FULL)}}


def record_byte_level(model: Path) -> dict[str, Any]:
    texts = corpus()
    found: dict[str, Any] = {}
    for pre in PRE_TOKENIZERS:
        metadata = tokenizer_metadata(model) | {"tokenizer.ggml.pre": pre}
        with tempfile.TemporaryDirectory() as folder:
            tiny = tiny_llama(Path(folder) / "tiny.gguf", metadata)
            with llama_server(tiny) as server:
                found[pre] = {
                    "text": record(server.tokenize, texts),
                    "special": record(lambda text: server.tokenize(text, parse_special=True), texts),
                }
    return found


def spoken(texts: list[str]) -> list[str]:
    """Leave out what sentencepiece cannot tell from a space."""
    return [text for text in texts if "▁" not in text]


def record_sentencepiece() -> dict[str, Any]:
    texts = spoken(corpus())
    # The sentences and the code; what they lack makes the rest of the corpus fall back to bytes.
    lines = [line for text in texts[:32] for line in text.splitlines() if line.strip()] * 3
    found: dict[str, Any] = {}
    for name, options in SENTENCEPIECES.items():
        processor = train_sentencepiece(lines, **options)
        metadata = sentencepiece_metadata(processor, space_prefix=options["add_dummy_prefix"])
        found[name] = {"metadata": metadata, "text": record(processor.encode, texts)}
    return found


def main() -> None:
    model = Path(sys.argv[1]) / "smollm2.gguf"
    for name, found in (("byte_level", record_byte_level(model)), ("sentencepiece", record_sentencepiece())):
        _RECORDED.joinpath(f"{name}.json").write_text(
            json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n"
        )


if __name__ == "__main__":
    main()
