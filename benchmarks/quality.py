"""What the kernels' arithmetic costs in quality: negative log-likelihood of a fixed text, against float32.

    python benchmarks/quality.py MODEL.gguf... [--tokens 4096]

Needs the oracle environment (torch, transformers). The text is made of modules of Python's own library, which
differ a little between versions; its hash stands in the result. The reference is transformers in float32 on
the same file, dequantised by transformers itself: weights are equal, and only the arithmetic differs (int8
activations, f16 cache).
"""

from __future__ import annotations

import argparse
import difflib
import fractions
import hashlib
import heapq
import inspect
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import ROOT, Floats, Rows
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.tools.provenance import describe_file
from paceline.weights.gguf import GGUFFile
from paceline.weights.source import Source

CHUNK = 512


def sample_text() -> str:
    """Code and the essays in it: five library modules, the same number of characters of each."""
    modules = (heapq, statistics, random, fractions, difflib)
    return "\n\n".join(inspect.getsource(module)[:5000] for module in modules)


def losses_of(logits: Floats, targets: Sequence[int]) -> Floats:
    """Negative log-likelihood [n] in nats of each target under its row of logits [n, vocab]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = np.log(np.exp(wide - top[:, None]).sum(axis=1)) + top
    losses: Floats = (total - wide[np.arange(len(targets)), np.asarray(targets)]).astype(np.float32)
    return losses


def our_logits(file: Source, tokens: Sequence[int]) -> Iterator[Floats]:
    """Logits [n, vocab] of successive chunks, one token short of the end."""
    target = NativeTarget.load(file, max_model_len=len(tokens))
    table = np.arange(target.pages, dtype=np.int32)[None]
    for start in range(0, len(tokens) - 1, CHUNK):
        ids = np.asarray(tokens[start : min(start + CHUNK, len(tokens) - 1)], np.int32)
        at = np.arange(start, start + len(ids), dtype=np.int32)
        own = np.full(len(ids), ROOT, np.int32)
        rows = Rows(
            ids, at, at, own, np.zeros(len(ids), np.int32), table, np.arange(len(ids), dtype=np.int32), True
        )
        logits = target.forward(rows).logits
        assert logits is not None
        yield logits


def reference_logits(path: Path, tokens: Sequence[int]) -> Iterator[Floats]:
    """The same from transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    cache = DynamicCache()
    with torch.inference_mode():
        for start in range(0, len(tokens) - 1, CHUNK):
            ids = torch.tensor([tokens[start : min(start + CHUNK, len(tokens) - 1)]])
            logits: Floats = model(ids, cache=cache, use_cache=True).logits[0].numpy()
            yield logits


def compare(path: Path, count: int) -> dict[str, Any]:
    """Both losses of one model over the first `count` tokens of the text."""
    file = GGUFFile.open(path)
    tokens = Tokenizer.from_gguf(file.metadata).encode(sample_text())[:count]
    assert len(tokens) == count, f"the text has only {len(tokens)} tokens"
    ours: list[Floats] = []
    theirs: list[Floats] = []
    agreed = 0
    divergence = 0.0
    pairs = zip(our_logits(file, tokens), reference_logits(path, tokens), strict=True)
    for i, (mine, reference) in enumerate(pairs):
        targets = tokens[i * CHUNK + 1 : i * CHUNK + 1 + len(mine)]
        ours.append(losses_of(mine, targets))
        theirs.append(losses_of(reference, targets))
        agreed += int((mine.argmax(axis=1) == reference.argmax(axis=1)).sum())
        divergence += divergence_of(reference, mine)
    difference = np.concatenate(ours).astype(np.float64) - np.concatenate(theirs)
    return {
        "model": describe_file(path),
        "tokens": count,
        "loss": float(np.concatenate(ours).mean(dtype=np.float64)),
        "reference_loss": float(np.concatenate(theirs).mean(dtype=np.float64)),
        "difference": float(difference.mean()),
        "standard_error": float(difference.std() / math.sqrt(len(difference))),
        "mean_absolute_difference": float(np.abs(difference).mean()),
        "divergence": divergence / len(difference),
        "same_argmax": agreed / len(difference),
    }


def divergence_of(reference: Floats, ours: Floats) -> float:
    """Sum over rows of KL(reference || ours) in nats."""
    total = 0.0
    for r, o in zip(reference, ours, strict=True):
        p, q = (x.astype(np.float64) - x.max() for x in (r, o))
        p -= math.log(np.exp(p).sum())
        q -= math.log(np.exp(q).sum())
        total += float((np.exp(p) * (p - q)).sum())
    return total


def main() -> None:
    from harness import results

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--name", default="quality", help="of the result files")
    asked = parser.parse_args()
    found = [compare(path, asked.tokens) for path in asked.models]
    head = ["model", "ours", "float32", "difference", "standard error", "KL divergence", "same argmax"]
    rows = [
        [
            r["model"]["name"],
            *(f"{r[key]:.4f}" for key in ("loss", "reference_loss")),
            f"{r['difference']:+.4f}",
            *(f"{r[key]:.4f}" for key in ("standard_error", "divergence")),
            f"{r['same_argmax']:.1%}",
        ]
        for r in found
    ]
    digest = hashlib.sha256(sample_text().encode()).hexdigest()
    title = f"# Quality\n\nNats per token over {asked.tokens} tokens of Python's own library.\n\n"
    results.write(asked.name, {"text_sha256": digest, "models": found}, title + results.table(head, rows))


if __name__ == "__main__":
    main()
