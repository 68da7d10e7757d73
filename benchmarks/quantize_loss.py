"""What rounding a folder's weights while loading costs: negative log-likelihood of a fixed text.

    python benchmarks/quantize_loss.py FOLDER... [--tokens 2048]

Each folder runs as it is, then with q8 and with q4; no other engine is needed. The text is `quality.py`'s.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
from quality import CHUNK, divergence_of, losses_of, our_logits, sample_text

from paceline.text.tokenizer import Tokenizer
from paceline.tools.provenance import describe_file
from paceline.weights.source import open_model

METHODS = (None, "q8", "q4")


def measure(path: Path, count: int) -> dict[str, Any]:
    """Losses of one folder by method; KL divergence and same argmax are against the folder as it is."""
    reference: list[Any] = []
    found: dict[str, Any] = {"model": describe_file(path), "tokens": count, "methods": {}}
    for method in METHODS:
        started = time.perf_counter()
        with open_model(path, method) as source:
            tokens = Tokenizer.from_gguf(source.metadata).encode(sample_text())[:count]
            size = sum(info.nbytes for info in source.tensors.values())
            losses, divergence, agreed = [], 0.0, 0
            for i, logits in enumerate(our_logits(source, tokens)):
                if method is None:
                    reference.append(logits.copy())
                losses.append(losses_of(logits, tokens[i * CHUNK + 1 : i * CHUNK + 1 + len(logits)]))
                divergence += divergence_of(reference[i], logits)
                agreed += int((logits.argmax(axis=1) == reference[i].argmax(axis=1)).sum())
        found["methods"][method or "as it is"] = {
            "tensor_bytes": size,
            "loss": float(np.concatenate(losses).mean(dtype=np.float64)),
            "divergence": divergence / (count - 1),
            "same_argmax": agreed / (count - 1),
            "seconds": time.perf_counter() - started,
        }
    return found


def main() -> None:
    from harness import results

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--name", default="quantize_loss", help="of the result files")
    asked = parser.parse_args()
    found = [measure(path, asked.tokens) for path in asked.folders]
    head = ["folder", "weights", "MB", "nats per token", "KL divergence", "same argmax"]
    rows = [
        [
            one["model"]["name"],
            method,
            f"{r['tensor_bytes'] / 1e6:.0f}",
            f"{r['loss']:.4f}",
            f"{r['divergence']:.4f}",
            f"{r['same_argmax']:.1%}",
        ]
        for one in found
        for method, r in one["methods"].items()
    ]
    digest = hashlib.sha256(sample_text().encode()).hexdigest()
    title = f"# Quantising while loading\n\n{asked.tokens} tokens of Python's own library.\n\n"
    results.write(asked.name, {"text_sha256": digest, "folders": found}, title + results.table(head, rows))


if __name__ == "__main__":
    main()
