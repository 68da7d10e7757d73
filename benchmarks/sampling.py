"""Microseconds to sample one token from one row of logits.

    python benchmarks/sampling.py [--logits ROWS.npy] [--rounds N]

Without ROWS.npy ([rows, vocab] float32, a model's own) rows are drawn that look like those of a 0.5B model
in running text: 151,936 logits, bulk of standard deviation 2.8, the best one 13 to 28 above its mean.
Arms are interleaved row by row, and the median over rows and rounds is reported beside the 90th percentile.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import Floats, SamplingParams
from paceline.sampling import Sampler

ARMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, frequency penalty": {"temperature": 0.0, "frequency_penalty": 0.5},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, frequency penalty": {"temperature": 0.8, "frequency_penalty": 0.5},
    "temperature 2": {"temperature": 2.0},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 2, top_p 0.95": {"temperature": 2.0, "top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "temperature 0.7, top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def typical_rows(count: int, vocab_size: int = 151_936) -> Floats:
    """[count, vocab] logits: a Gaussian bulk, and a few hundred plausible tokens falling from the best."""
    random = np.random.default_rng(0)
    rows = random.normal(-5, 2.8, (count, vocab_size))
    for row in rows:
        plausible = random.choice(vocab_size, 300, replace=False)
        best = random.uniform(8, 23)
        row[plausible] = best - random.uniform(0.3, 2) * np.arange(300) ** 0.5 - random.exponential(0.5, 300)
    return rows.astype(np.float32)


def measure(rows: Floats, rounds: int) -> dict[str, list[float]]:
    """Seconds of every pick, for each arm; the first round warms up and is dropped."""
    vocab_size = rows.shape[1]
    samplers = {
        name: Sampler(SamplingParams(**params), range(1000), (), vocab_size, seed=1)
        for name, params in ARMS.items()
    }
    for sampler in samplers.values():
        for token in range(500, 1500):
            sampler.advance(token)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    position = 0
    for round_index in range(1 + rounds):
        for row in rows:
            argmax = int(row.argmax())
            for name, sampler in samplers.items():
                begin = time.perf_counter()
                sampler.pick(row, argmax, position)
                if round_index:
                    seconds[name].append(time.perf_counter() - begin)
            position += 1
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--logits", type=Path, help="a .npy file of [rows, vocab] float32 logits")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows = typical_rows(24) if options.logits is None else np.load(options.logits).astype(np.float32)
    print(f"{len(rows)} rows of {rows.shape[1]:,} logits, {options.rounds} rounds; microseconds per token\n")
    print(f"{'':40}{'median':>8}{'p90':>8}{'least':>8}")
    for name, seconds in measure(rows, options.rounds).items():
        micro = np.array(seconds) * 1e6
        print(f"{name:40}{np.median(micro):8.0f}{np.quantile(micro, 0.9):8.0f}{micro.min():8.0f}")


if __name__ == "__main__":
    main()
