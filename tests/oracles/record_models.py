"""Records greedy texts of the demo model that transformers in float32 and our kernels agree on.

    PYTHONPATH=tests python -m oracles.record_models

Run in the oracle environment. A text ends where they part: int8 activations decide near ties the other way.
"""

from __future__ import annotations

import json
from pathlib import Path

from oracles.model_references import TransformersModel
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.weights import hub
from paceline.weights.gguf import GGUFFile
from support.passes import greedy

GREEDY = Path(__file__).parents[1] / "models" / "recorded" / "smollm2_greedy.json"
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
    GREEDY.parent.mkdir(exist_ok=True)
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in recorded.items()]
    GREEDY.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
