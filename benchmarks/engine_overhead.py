"""What a step costs besides the target's pass: microseconds of planning, laying rows, committing.

The target answers at once with a constant token, so everything that is left is ours. Run it as
`python benchmarks/engine_overhead.py`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from paceline.core import ROOT, Context, Draft, Ids, Outcome, Output, Rows, SamplingParams
from paceline.engine.engine import Engine
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from support.planners import FixedPlanner
from support.tiny_tokenizer import tiny_tokenizer

TOKEN = ord("a")


class ConstantTarget:
    """Answers every row with one token, from arrays made beforehand."""

    context_limit = 40_000
    max_rows = 512
    page_size = 32
    pages = 4000
    window = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._argmax: Ids = np.full(self.max_rows, TOKEN, np.int32)
        self._logits = np.zeros((self.max_rows, vocab_size), np.float32)
        self._logits[:, TOKEN] = 40.0

    def forward(self, rows: Rows) -> Output:
        wanted = len(rows.wanted)
        return Output(self._argmax[:wanted], self._logits[:wanted] if rows.logits else None)

    def move(
        self, table: Ids, sources: Sequence[int], targets: Sequence[int], window_table: Ids | None = None
    ) -> None: ...

    def copy_page(self, source: int, target: int) -> None: ...


class ConstantDrafter:
    """Offers a draft made beforehand: `rows` guesses, a chain or a chain with two siblings at each node."""

    name = "constant"

    def __init__(self, nodes: int, *, tree: bool = False) -> None:
        draft = Draft.chain([TOKEN] * nodes, [0.9] * nodes, self.name)
        if tree:
            draft = _bushy(nodes, self.name)
        self._drafts = [_cut(draft, n) for n in range(nodes + 1)]

    def propose(self, context: Context, budget: int) -> Draft:
        del context
        return self._drafts[min(budget, len(self._drafts) - 1)]

    def commit(self, context: Context, outcome: Outcome | None) -> None: ...

    def forget(self, context: Context) -> None: ...


def _bushy(nodes: int, source: str) -> Draft:
    parents = [ROOT if i < 2 else (i - 1) // 2 * 2 - 1 for i in range(nodes)]
    tokens = [TOKEN if i % 2 else TOKEN + 1 for i in range(nodes)]  # the second sibling is right
    return Draft(tokens, parents, [0.9] * nodes, (source,) * nodes)


def _cut(draft: Draft, n: int) -> Draft:
    return Draft(draft.tokens[:n], draft.parents[:n], draft.chances[:n], draft.sources[:n])


class Timed:
    """Seconds spent in some methods, summed up by name. Inner methods are taken out of outer ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, label: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start

        setattr(owner, method, timed)


def measure(
    planner: Any, params: SamplingParams, *, vocab_size: int, prompt: int, requests: int
) -> dict[str, float]:
    """Microseconds per decode step by phase; the requests share every step and write the same."""
    engine = Engine(ConstantTarget(vocab_size), tiny_tokenizer())
    timed = Timed()
    timed.wrap(engine.target, "forward", "pass")
    timed.wrap(engine._rows, "build", "rows")
    timed.wrap(engine, "_commit", "commit")
    timed.wrap(engine, "_hand_over", "hand over")
    timed.wrap(planner, "plan", "plan")
    timed.wrap(planner, "commit", "drafters follow")
    texts = [
        engine.add([TOKEN + 2, i, *range(64, 96)] * (prompt // 34 + 1), params, planner, seed=1)
        for i in range(requests)
    ]
    while not all(request.generated for request in texts):
        engine.step()
    timed.seconds.clear()
    steps, tokens, start = engine.counters.passes, engine.counters.generated_tokens, time.perf_counter()
    while not engine.idle:
        engine.step()
    seconds = time.perf_counter() - start
    steps = engine.counters.passes - steps
    tokens = engine.counters.generated_tokens - tokens
    parts = {name: value / steps * 1e6 for name, value in timed.seconds.items()}
    parts["commit"] -= parts.get("drafters follow", 0.0)
    whole = seconds / steps * 1e6 - parts.pop("pass", 0.0)
    parts["rest"] = whole - sum(parts.values())
    return {"steps": float(steps), "tokens": tokens / steps, "whole": whole, **parts}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=4000)
    arguments.add_argument("--vocab-size", type=int, default=262)
    arguments.add_argument("--prompt", type=int, default=500, help="prompt tokens")
    arguments.add_argument("--requests", type=int, default=1, help="that share every step")
    asked = arguments.parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=asked.tokens)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=asked.tokens, seed=1)
    speculating = Planner(PassTime({1: 1e-3, 64: 1e-3}), [ConstantDrafter(7)])
    arms: dict[str, tuple[Any, SamplingParams]] = {
        "plain": (FixedPlanner(), greedy),
        "chain of 7": (FixedPlanner(ConstantDrafter(7), 7), greedy),
        "chain of 8": (FixedPlanner(ConstantDrafter(8), 8), greedy),
        "tree of 8": (FixedPlanner(ConstantDrafter(8, tree=True), 8), greedy),
        "planned chain of 7": (speculating, greedy),
        "sampled chain of 7": (FixedPlanner(ConstantDrafter(7), 7), sampled),
    }
    for name, (planner, params) in arms.items():
        figures = measure(
            planner, params, vocab_size=asked.vocab_size, prompt=asked.prompt, requests=asked.requests
        )
        parts = "  ".join(f"{key} {value:.1f}" for key, value in figures.items())
        print(f"{name:<20} {parts}")


if __name__ == "__main__":
    main()
