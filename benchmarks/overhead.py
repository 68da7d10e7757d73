"""What Python and planning take of a step with a real model, as a share of a one-row pass.

A step's cost beside the pass is the time from one chunk of text to the next, less the time inside the
target's own calls. See README.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness import results, tasks

from paceline import LLM, SamplingParams
from paceline.core import Output, Rows
from paceline.engine.llm import Speculate
from paceline.tools.provenance import describe_file

LIMIT = 0.05


class Clock:
    """Seconds inside a target's calls; those of one-row passes are kept one by one."""

    def __init__(self, target: Any) -> None:
        self.inside = 0.0
        self.one_row: list[float] = []
        self._forward: Callable[[Rows], Output] = target.forward
        self._move: Callable[..., None] = target.move
        target.forward, target.move = self._timed_forward, self._timed_move

    def _timed_forward(self, rows: Rows) -> Output:
        start = time.perf_counter()
        output = self._forward(rows)
        seconds = time.perf_counter() - start
        self.inside += seconds
        if len(rows.tokens) == 1:
            self.one_row.append(seconds)
        return output

    def _timed_move(self, *arguments: Any) -> None:
        start = time.perf_counter()
        self._move(*arguments)
        self.inside += time.perf_counter() - start


@dataclass(slots=True)
class Steps:
    """Microseconds of every decode step beside the target's calls, but each request's first."""

    microseconds: list[float] = field(default_factory=list)

    def summary(self, one_row_us: float) -> dict[str, float]:
        ordered = sorted(self.microseconds)
        return {
            "steps": len(ordered),
            "mean_us": fmean(ordered),
            "median_us": median(ordered),
            "p95_us": ordered[int(0.95 * (len(ordered) - 1))],
            "share": fmean(ordered) / one_row_us,
        }


def main() -> None:
    asked = arguments()
    with LLM(asked.model, threads=asked.threads, max_model_len=4096) as llm:
        todo = tasks.collect(
            llm,
            spec_bench=asked.spec_bench,
            human_eval=asked.humaneval,
            per_category=asked.per_category,
            longest=3000,
        )
        clock = Clock(llm.engine.target)
        arms: dict[str, Steps] = {"off": Steps(), "auto": Steps()}
        for task in todo:
            for speculate, steps in arms.items():
                llm.clear()
                steps.microseconds += measure(llm, clock, task.ids, speculate, asked.max_tokens)
    one_row = median(clock.one_row) * 1e6
    found = {name: steps.summary(one_row) for name, steps in arms.items()}
    result = {"model": describe_file(asked.model), "one_row_us": one_row, "limit": LIMIT, "arms": found}
    results.write(
        asked.name,
        result | {"steps": {n: asdict(s) for n, s in arms.items()}},
        markdown(asked, one_row, found),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--spec-bench", type=Path)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--per-category", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="overhead", help="of the result files")
    return parser.parse_args()


def measure(llm: LLM, clock: Clock, ids: list[int], speculate: Speculate, max_tokens: int) -> list[float]:
    """Microseconds beside the target's calls, for each decode step of one request but the first."""
    found = []
    with llm.stream(
        ids, SamplingParams(temperature=0.0, max_tokens=max_tokens), speculate=speculate
    ) as stream:
        next(stream)
        next(stream, None)  # the first decode step makes arrays that are kept
        inside, start = clock.inside, time.perf_counter()
        for _ in stream:
            now = time.perf_counter()
            found.append((now - start - (clock.inside - inside)) * 1e6)
            inside, start = clock.inside, time.perf_counter()
    return found


def markdown(asked: argparse.Namespace, one_row: float, found: dict[str, dict[str, float]]) -> str:
    head = ["", "steps", "mean µs", "median µs", "95th µs", "mean / one-row pass"]
    rows = [
        [name, int(f["steps"]), f["mean_us"], f["median_us"], f["p95_us"], f"{f['share']:.1%}"]
        for name, f in found.items()
    ]
    title = (
        f"# Python and planning per step, {asked.model.name}\n\nA one-row pass takes {one_row:.0f} µs.\n\n"
    )
    return title + results.table(head, rows)


if __name__ == "__main__":
    main()
