"""Fit a head to a model on text that the model writes, and see how often its guesses are taken.

    python benchmarks/fit_head.py smollm2 eagle3 heads/eagle3 --tokens 30000 --steps 300
    paceline run smollm2 --drafter eagle3:heads/eagle3

Needs `pip install "paceline[train]"`. Every fifth prompt is held back; the others are answered greedily, then
with one seed after the other, until there are enough tokens. What comes out is a first head, of minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.tools import prompts
from paceline.training import need_torch
from paceline.training.transcripts import Transcript, write
from paceline.training.trial import trial

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
HELD_BACK = 5
LONGEST = 192


def rounds() -> Iterator[SamplingParams]:
    """Greedy, then sampled with one seed after the other."""
    yield SamplingParams(temperature=0.0, max_tokens=LONGEST)
    seed = 0
    while True:
        yield SamplingParams(temperature=0.8, seed=seed, max_tokens=LONGEST)
        seed += 1


def texts(llm: LLM, asked: list[prompts.Prompt], layers: list[int], tokens: int) -> list[Transcript]:
    """Texts of so many tokens or a few more."""
    found: list[Transcript] = []
    for params in rounds():
        some = [prompt.as_messages() for prompt in asked]
        found += write(llm, some, [params] * len(some), layers, print)
        if (have := sum(map(len, found))) >= tokens:
            return found
        print(f"{have} of {tokens} tokens")
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("kind", choices=["eagle", "eagle3", "mtp", "dflash", "dspark"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--tokens", type=int, default=30000, help="that the model writes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--texts", type=int, default=8, help="in a batch")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="of eagle3")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    need_torch()
    from paceline.training.fit import Recipe, fit
    from paceline.training.kinds import new_head, taps_of
    from paceline.training.teacher import Teacher

    asked = prompts.load(arguments.prompts)
    llm = LLM(arguments.model, speculate="off", threads=arguments.threads, max_model_len=2048)
    teacher = Teacher(llm.engine.target)
    taps = taps_of(arguments.kind, teacher.depth)
    layers = sorted({*taps, teacher.depth})
    known = [prompt for i, prompt in enumerate(asked) if i % HELD_BACK]
    written = texts(llm, known, layers, arguments.tokens)
    head = new_head(arguments.kind, teacher, written, draft_vocab=arguments.draft_vocab)
    fit(head, written, Recipe(steps=arguments.steps, texts=arguments.texts, rate=1e-3), print)
    folder = head.save(arguments.out)
    llm.clear()
    new = [prompt.as_messages() for prompt in asked[::HELD_BACK]]
    for params in (SamplingParams(temperature=0.0, max_tokens=96), SamplingParams(seed=1, max_tokens=96)):
        found = trial(llm, arguments.kind, folder, new, params)
        shares = ", ".join(f"{share:.2f}" for share in found.shares)
        print(f"temperature {params.temperature}: of {found.passes} passes kept 1, 2, ... tokens: {shares}")


if __name__ == "__main__":
    main()
