"""Records what transformers in float32 computes: greedy texts of the demo model, and values of tiny models.

    PYTHONPATH=tests python -m oracles.record_models

Run in the oracle environment. The demo model's texts end where our kernels part from them: int8 activations
decide near ties the other way.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oracles.model_references import TransformersModel
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.weights import hub
from paceline.weights.gguf import GGUFFile
from support.passes import greedy, random_tokens
from support.zoo import LENGTH, ZOO

GREEDY = Path(__file__).parents[1] / "models" / "recorded" / "smollm2_greedy.json"
TINY = GREEDY.with_name("tiny_models.json")
COUNT = 48


def prompts() -> dict[str, str]:
    """Prompts by name; control tokens are spelt out."""
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return {
        "capital": chat.format("What is the capital of France?"),
        "counting": "1 2 3 4 5 6 7 8 9 10 11 12",
        "alphabet": "a b c d e f g",
        "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
        "repetition": "The cat sat on the mat. The cat sat on the mat. The cat sat on the",
        "story": chat.format("Tell me a short story about a fox."),
        "list": chat.format("Name three colours."),
        "licence": "Licensed under the Apache License, Version 2.0 (the",
        "html": "<ul>\n  <li>one</li>\n  <li>two</li>\n",
        "numbers": chat.format("Repeat: 17, 42, 99, 3"),
        "french": "Bonjour, je m'appelle",
        "one token": "Hello",
    }


def main() -> None:
    _write(GREEDY, demo_model())
    _write(TINY, tiny_models())


def demo_model() -> dict[str, Any]:
    """Prompts and outputs by name of prompt."""
    path = hub.resolve("smollm2")
    file = GGUFFile.open(path)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    target = NativeTarget.load(file, max_model_len=512)
    reference = TransformersModel(path)
    recorded = {}
    for name, prompt in prompts().items():
        ids = tokenizer.encode(prompt)
        ours, theirs = greedy(target, ids, COUNT), reference.greedy(ids, COUNT)
        agreed = next((i for i in range(COUNT) if ours[i] != theirs[i]), COUNT)
        if agreed:
            recorded[name] = {"prompt": ids, "output": ours[:agreed]}
    return recorded


def tiny_models() -> dict[str, Any]:
    """The logits after a text, and how it goes on, by name of model."""
    recorded = {}
    for name, model in ZOO.items():
        with TemporaryDirectory() as folder:
            reference = TransformersModel(model.write(Path(folder) / "model.gguf"))
        tokens = random_tokens(LENGTH, model.vocab)
        logits = [round(float(logit), 5) for logit in reference.logits(tokens)[-1]]
        recorded[name] = {"logits": logits, "greedy": reference.greedy(tokens, 24)}
    return recorded


def _write(path: Path, recorded: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in recorded.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
