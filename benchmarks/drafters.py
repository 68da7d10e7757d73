"""Drafters without a model: what they cost, and what they would have saved on texts already written.

    python benchmarks/drafters.py cost
    python benchmarks/drafters.py replay TRACES.jsonl --speculate auto

`cost` prints microseconds per appended token and per step (propose, plan, commit) at several context
lengths. `replay` takes lines {"prompt_ids": [...], "output_ids": [...], "category": "..."} and lets the
planner loose on them as if the target were writing them, pass times taken from a table; it prints tokens
per pass and the speed-up over plain decoding that the table implies, drafting time included. Drafting is
timed in processor time of the thread, so that a busy machine tells the same story.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from paceline.core import ROOT, Context, Draft, Outcome
from paceline.drafters.registry import configure
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner

TABLE = {1: 5.0e-3, 2: 5.1e-3, 4: 5.5e-3, 8: 7.0e-3, 16: 13.0e-3}
VOCAB = 1 << 18


@dataclass
class Replay:
    """What replaying one text gave; seconds are those of the table."""

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    planning: float = 0.0


def accept(draft: Draft, truth: list[int]) -> tuple[int, ...]:
    """Indices of the draft nodes along the true text."""
    children: dict[tuple[int, int], int] = {
        (parent, token): i for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
    }
    path: list[int] = []
    node = ROOT
    for token in truth:
        node = children.get((node, token), ROOT)
        if node == ROOT:
            break
        path.append(node)
    return tuple(path)


def replay(planner: Planner, request: int, line: dict, log: list | None = None) -> Replay:
    """Write the output after the prompt as the engine would, against the planner's own pass times."""
    prompt, output = line["prompt_ids"], line["output_ids"]
    result = Replay()
    context = Context(request, [*prompt, output[0]], len(prompt))
    planner.commit(context, None)
    at = 1
    while at < len(output):
        start = time.thread_time()
        draft = planner.plan([context], [len(output) - at - 1])[0]
        middle = time.thread_time()
        path = accept(draft, output[at:])
        committed = output[at : at + len(path) + 1]
        context.tokens += committed
        at += len(committed)
        outcome = Outcome(draft, path, tuple(committed)) if len(draft) else None
        if log is not None and outcome is not None:
            paths = draft.chances
            log += [(paths[i], hit) for i, hit in outcome.tested]
        again = time.thread_time()
        planner.commit(context, outcome)
        result.planning += middle - start + time.thread_time() - again
        result.passes += 1
        result.tokens += len(committed)
        result.drafted += len(draft)
        result.accepted += len(path)
        result.seconds += planner.pass_time.cost(1 + len(draft))
    planner.forget(context)
    return result


def run_replay(args: argparse.Namespace) -> None:
    lines = [json.loads(line) for file in args.traces for line in Path(file).read_text().splitlines()]
    random.Random(args.seed).shuffle(lines)
    table = PassTime(TABLE)
    speculation = configure(args.speculate, vocab_size=VOCAB)
    planner = Planner(table, speculation.drafters, draft_length=speculation.draft_length)
    by_category: dict[str, list[Replay]] = defaultdict(list)
    log: list[tuple[float, bool]] = []
    for request, line in enumerate(lines):
        result = replay(planner, request, line, log)
        by_category[line["category"]].append(result)
    print(
        f"{'category':<16}{'n':>4}{'tok/pass':>10}{'drafted':>9}{'accept':>8}{'us/step':>9}{'speed-up':>10}"
    )
    for category, results in [
        *sorted(by_category.items()),
        ("all", [*chain.from_iterable(by_category.values())]),
    ]:
        passes = sum(r.passes for r in results)
        tokens = sum(r.tokens for r in results)
        drafted = sum(r.drafted for r in results)
        accepted = sum(r.accepted for r in results)
        planning = sum(r.planning for r in results)
        plain = tokens * TABLE[1]
        speedup = plain / (sum(r.seconds for r in results) + planning)
        print(
            f"{category:<16}{len(results):>4}{tokens / passes:>10.3f}{drafted / passes:>9.2f}"
            f"{accepted / max(drafted, 1):>8.3f}{planning / passes * 1e6:>9.0f}{speedup:>10.3f}"
        )
    reliability(log)


def reliability(log: list[tuple[float, bool]]) -> None:
    """Claimed chance against what came true, in ten bins, and the mean log loss."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    loss = 0.0
    for chance, hit in log:
        bins[min(int(chance * 10), 9)].append((chance, hit))
        loss -= math.log(max(chance if hit else 1 - chance, 1e-6))
    print("claimed -> came true (n)")
    for _, pairs in sorted(bins.items()):
        claimed = sum(c for c, _ in pairs) / len(pairs)
        print(f"  {claimed:.3f} -> {sum(h for _, h in pairs) / len(pairs):.3f} ({len(pairs)})")
    print(f"log loss {loss / max(len(log), 1):.4f}")


def run_cost(args: argparse.Namespace) -> None:
    rng = random.Random(0)
    vocabulary = [rng.randrange(VOCAB) for _ in range(3000)]
    weights = [1 / (i + 1) for i in range(3000)]
    print(f"{'context':>8}{'append us':>11}{'propose+plan us':>17}{'commit us':>11}")
    for length in (1_000, 8_000, 32_000):
        text = rng.choices(vocabulary, weights, k=length)
        for i in range(0, length - 300, 600):  # half of it is copied from earlier, as in an edit or a summary
            at = rng.randrange(max(1, i))
            text[i : i + 300] = text[at : at + 300]
        speculation = configure(args.speculate, vocab_size=VOCAB)
        planner = Planner(PassTime(TABLE), speculation.drafters)
        context = Context(0, text[:-200], length - 200)
        start = time.thread_time()
        planner.commit(context, None)
        append = (time.thread_time() - start) / (length - 200)
        propose = commit = 0.0
        for token in text[-200:]:
            start = time.thread_time()
            draft = planner.plan([context], [15])[0]
            propose += time.thread_time() - start
            context.tokens.append(token)
            outcome = Outcome(draft, accept(draft, [token]), (token,)) if len(draft) else None
            start = time.thread_time()
            planner.commit(context, outcome)
            commit += time.thread_time() - start
        print(f"{length:>8}{append * 1e6:>11.2f}{propose / 200 * 1e6:>17.1f}{commit / 200 * 1e6:>11.1f}")


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(required=True)
    cost = commands.add_parser("cost", help="microseconds per token and step")
    cost.add_argument("--speculate", default="auto")
    cost.set_defaults(run=run_cost)
    traces = commands.add_parser("replay", help="simulated speed-up on recorded texts")
    traces.add_argument("traces", nargs="+")
    traces.add_argument("--speculate", default="auto")
    traces.add_argument("--seed", type=int, default=0)
    traces.set_defaults(run=run_replay)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
