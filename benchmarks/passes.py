"""What a pass costs by number of rows, ours and llama.cpp's by turns, and its share of the read bandwidth.

Each round times every kind of pass here, then runs llama-bench on the same file; figures are medians over
rounds of each round's median, ratios medians over rounds of the round's own ratio, so that a machine that
drifts does so for both. Ours computes the next token of every row, as checking drafts needs; llama-bench
that of the last row only. The prefill computes the last row's only in both. See README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import llama_cpp, results

from paceline import native
from paceline.models.target import NativeTarget
from paceline.tools.profile import Profile, profile
from paceline.tools.provenance import describe_file
from paceline.weights.gguf import GGUFFile

ROWS = (1, 2, 4, 8, 16, 512)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds by rows of one round; `share` is of the read bandwidth at one row."""

    ours: dict[int, float]
    ours_best: dict[int, float]
    theirs: dict[int, float]
    theirs_best: dict[int, float]
    bandwidth: float
    share: float


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of pass over all rounds.

    Attributes:
        ours, theirs: seconds, median of the rounds' medians; None where not measured.
        ours_best, theirs_best: the fastest pass of any round.
        ratio: ours over theirs, median of the rounds' ratios; `ratio_best` of the fastest passes.
        over_one: our seconds over those of one row, median of the rounds' ratios; `theirs_over_one` theirs.
    """

    rows: int
    ours: float
    ours_best: float
    over_one: float
    theirs: float | None
    theirs_best: float | None
    theirs_over_one: float | None
    ratio: float | None
    ratio_best: float | None


def main() -> None:
    asked = arguments()
    parts, models = [], []
    for path in asked.models:
        with GGUFFile.open(path) as file:
            target = NativeTarget.load(file, threads=asked.threads)
            rounds = [measure(target, path, asked) for _ in range(asked.rounds)]
        kinds = [summarize(rows, rounds) for rows in ROWS]
        share = median(r.share for r in rounds)
        bandwidth = median(r.bandwidth for r in rounds)
        models.append(
            {
                "model": describe_file(path),
                "isa": target.isa,
                "weight_bytes": target.weight_bytes,
                "read_bandwidth": bandwidth,
                "share_at_one_row": share,
                "kinds": [asdict(kind) for kind in kinds],
                "rounds": [asdict(r) for r in rounds],
            }
        )
        parts.append(markdown(path, target, kinds, bandwidth, share))
    peer = llama_cpp.version(asked.llama_bench.with_name("llama-server")) if asked.llama_bench else None
    result = {"threads": asked.threads, "context": asked.context, "llama.cpp": peer, "models": models}
    results.write(asked.name, result, "# Passes by number of rows\n\n" + "\n".join(parts))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--llama-bench", type=Path, help="binary of llama.cpp's bench tool")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each kind of pass, round and engine")
    parser.add_argument("--repeats", type=int, default=8, help="passes of each kind in a run of llama-bench")
    parser.add_argument("--context", type=int, default=0, help="tokens in the cache during a pass")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="passes", help="of the result files")
    return parser.parse_args()


def measure(target: NativeTarget, path: Path, asked: argparse.Namespace) -> Round:
    theirs: dict[int, list[float]] = {}
    if asked.llama_bench:
        theirs = llama_cpp.bench(
            asked.llama_bench,
            path,
            rows=ROWS,
            repeats=asked.repeats,
            threads=asked.threads,
            depth=asked.context,
        )
    found: Profile = profile(
        target,
        weight_bytes=target.weight_bytes,
        kv_bytes_per_token=target.cache.read(max(asked.context, 1)) // max(asked.context, 1),
        read_bandwidth=lambda: native.read_bandwidth(target.threads),
        context=asked.context,
        budget_s=asked.seconds,
    )
    costs = {cost.rows: cost for cost in found.passes}
    return Round(
        {rows: costs[rows].seconds for rows in ROWS},
        {rows: costs[rows].fastest for rows in ROWS},
        {rows: median(times) for rows, times in theirs.items()},
        {rows: min(times) for rows, times in theirs.items()},
        found.read_bandwidth,
        costs[1].bandwidth_share,
    )


def summarize(rows: int, rounds: Sequence[Round]) -> Kind:
    """One kind of pass over all rounds; ratios are taken within a round, where both saw the same machine."""
    compared = [r for r in rounds if rows in r.theirs]
    best = min(r.ours_best[rows] for r in rounds)
    their_best = min((r.theirs_best[rows] for r in compared), default=None)
    return Kind(
        rows,
        median(r.ours[rows] for r in rounds),
        best,
        median(r.ours[rows] / r.ours[1] for r in rounds),
        median(r.theirs[rows] for r in compared) if compared else None,
        their_best,
        median(r.theirs[rows] / r.theirs[1] for r in compared) if compared else None,
        median(r.ours[rows] / r.theirs[rows] for r in compared) if compared else None,
        best / their_best if their_best else None,
    )


def markdown(path: Path, target: NativeTarget, kinds: Sequence[Kind], bandwidth: float, share: float) -> str:
    head = [
        "rows",
        "ours ms",
        "best",
        "of one row",
        "llama.cpp ms",
        "best",
        "of one row",
        "ours / llama",
        "of bests",
    ]
    rows: list[list[Any]] = []
    for kind in kinds:
        ours = [kind.ours * 1e3, kind.ours_best * 1e3, kind.over_one]
        theirs = [_ms(kind.theirs), _ms(kind.theirs_best), kind.theirs_over_one]
        rows.append([kind.rows, *ours, *theirs, kind.ratio, kind.ratio_best])
    note = (
        f"{target.weight_bytes / 1e6:.0f} MB of weights a pass, read bandwidth {bandwidth / 1e9:.1f} GB/s, "
        f"of which one row uses {share:.0%}."
    )
    return f"## {path.name}\n\n{note}\n\n{results.table(head, rows)}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


if __name__ == "__main__":
    main()
