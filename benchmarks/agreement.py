"""How far greedy texts agree: ours, llama.cpp's with either attention, and what exact arithmetic would write.

    python benchmarks/agreement.py MODEL.gguf... --llama-server BINARY [--spec-bench FILE] [--humaneval FILE]

Needs the oracle environment (torch, transformers). Every engine continues the same ids on the same file. Both
round activations to int8, each in its own way, so where two tokens are nearly as likely either may come
first, and from there on two texts have nothing to do with each other. transformers in float32, on the
weights that it dequantises itself, reads each text and tells where it would have gone another way, and how
near the two likeliest tokens were to each other there: the gap, in logits. llama.cpp without its flash
attention, the same mathematics in another order, tells how much of it is rounding alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import llama_cpp, results, tasks
from harness.arms import PacelineArm

from paceline import LLM
from paceline.core import Floats
from paceline.tools.provenance import describe_file

PAIRS = ("ours / llama.cpp", "ours / float32", "llama.cpp / float32", "llama.cpp / without flash attention")
NEAR = 0.1


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two texts part.

    Attributes:
        at: tokens that they have in common; None if they never part.
        gap: between the two likeliest logits there, in float32.
    """

    at: int | None
    gap: float = 0.0


class Exact:
    """transformers in float32 on a GGUF file."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
        )

    def read(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[list[int], Floats]:
        """Its choice [n] before each token of a text and behind the last, and the gaps [n] there."""
        ids = self._torch.tensor([[*prompt, *text]])
        with self._torch.inference_mode():
            logits = self._model(ids, logits_to_keep=len(text) + 1).logits[0]
            (first, second), best = logits.topk(2).values.numpy().T, logits.argmax(-1)
        return best.tolist(), first - second


def parting(a: Sequence[int], b: Sequence[int], gaps: Floats) -> Parting:
    """Compare two texts; one that ended where the other goes on parts from it there."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return Parting(None) if at == len(a) == len(b) else Parting(at, float(gaps[at]))


def written(tokens: Sequence[int], ends: Container[int]) -> Sequence[int]:
    """Without the token that ends it, which not every engine returns."""
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


def compare(path: Path, asked: argparse.Namespace) -> dict[str, list[Parting]]:
    """Where the texts of each pair part, for every prompt."""
    found: dict[str, list[Parting]] = {pair: [] for pair in PAIRS}
    with LLM(path, max_model_len=asked.context) as llm, tempfile.TemporaryDirectory() as logs:
        todo = tasks.collect(
            llm,
            spec_bench=asked.spec_bench,
            human_eval=asked.humaneval,
            per_category=asked.per_category,
            longest=asked.context - asked.tokens - 1,
        )
        peers = [
            llama_cpp.LlamaServerArm(
                asked.llama_server,
                path,
                "plain",
                threads=2,
                context=asked.context,
                log=Path(logs) / f"flash-{flash}",
                flags=("-fa", flash),
            )
            for flash in ("auto", "off")
        ]
        arms = [PacelineArm(llm, "off"), *peers]
        exact = Exact(path)
        try:
            for task in todo[: asked.prompts]:
                texts = [
                    written(arm.answer(task.ids, asked.tokens).tokens, llm.tokenizer.eog_ids) for arm in arms
                ]
                for pair, one in zip(PAIRS, one_prompt(exact, task.ids, *texts), strict=True):
                    found[pair].append(one)
                print(task.prompt.name, *(f"{pair} {found[pair][-1].at}" for pair in PAIRS), sep="  ")
        finally:
            for peer in peers:
                peer.close()
    return found


def one_prompt(
    exact: Exact, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], again: Sequence[int]
) -> list[Parting]:
    """In the order of `PAIRS`. A text's last token, at its end or its limit, is followed by nothing."""
    (choices, gaps), (others, other_gaps) = (exact.read(prompt, text) for text in (ours, theirs))
    return [
        parting(ours, theirs, gaps),
        parting(ours, choices[: len(ours)], gaps),
        parting(theirs, others[: len(theirs)], other_gaps),
        parting(theirs, again, other_gaps),
    ]


def summary(found: dict[str, list[Parting]]) -> list[list[object]]:
    rows: list[list[object]] = []
    for pair, partings in found.items():
        gaps = [one.gap for one in partings if one.at is not None]
        rows.append(
            [
                pair,
                f"{len(partings) - len(gaps)} of {len(partings)}",
                f"{sum(gap < NEAR for gap in gaps)} of {len(gaps)}",
                statistics.median(gaps) if gaps else None,
                float(np.max(gaps)) if gaps else None,
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--llama-server", type=Path, required=True, help="binary of llama.cpp's server")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench questions (JSON lines)")
    parser.add_argument("--humaneval", type=Path, help="HumanEval problems (JSON lines)")
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=50, help="at most so many")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--name", default="agreement", help="of the result files")
    asked = parser.parse_args()
    result: dict[str, Any] = {"tokens": asked.tokens, "models": []}
    head = ["", "equal", f"gap below {NEAR} where not", "median gap", "largest gap"]
    text = (
        f"# Greedy texts: how many agree for {asked.tokens} tokens, and how near the choice was where not\n"
    )
    for path in asked.models:
        found = compare(path, asked)
        partings = {pair: [asdict(one) for one in some] for pair, some in found.items()}
        result["models"].append({"model": describe_file(path), "partings": partings})
        text += f"\n## {path.name}\n\n{results.table(head, summary(found))}"
    results.write(asked.name, result, text)


if __name__ == "__main__":
    main()
