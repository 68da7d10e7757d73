"""Thousands of mixed requests to one server, a quarter of them cancelled at random moments.

None may be lost, stuck or changed: every completed text equals that of the same request asked alone. The
server's memory must stay flat, and afterwards nothing may be running. See README.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import results, servers
from harness.storm import Moment, Storm, Watch, Weather, growth, make_cases, serially, still_busy
from harness.tasks import OWN_PROMPTS

from paceline.tools import prompts
from paceline.tools.load_figures import written
from paceline.tools.provenance import describe_file
from paceline.tools.statistics import quantiles
from paceline.weights import hub

IDLE_WITHIN_S = 10.0
SHOWN = 20


def main() -> None:
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left running
    model = hub.resolve(asked.model)
    cases = make_cases(prompts.load(OWN_PROMPTS), asked.cases, asked.max_tokens, asked.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.paceline(
            model,
            asked.speculate,
            threads=asked.threads,
            context=asked.context,
            log=Path(folder) / "server.log",
            more=("--max-num-seqs", str(asked.slots)),
        ) as server,
    ):
        print(f"{len(cases)} requests one by one", flush=True)
        alone = serially(server.client, cases)
        weather = Weather(server.client, cases, alone, cancel=asked.cancel, seed=asked.seed)
        print(f"{asked.requests} requests by {asked.clients} clients", flush=True)
        watch = Watch(server.resident_bytes, weather.storm)
        started = time.perf_counter()
        weather.rage(asked.requests, asked.clients)
        seconds = time.perf_counter() - started
        watch.close()
        busy = still_busy(server.client, IDLE_WITHIN_S)
        again = serially(server.client, cases)  # the storm must have left nothing behind
        changed = [key for key in alone if again[key] != alone[key]]
    found = summary(asked, weather.storm, watch.moments, seconds, busy, changed)
    result = {"model": describe_file(model), "settings": settings(asked)} | found
    results.write(asked.name, result | details(weather.storm, watch.moments), markdown(model.name, found))
    sys.exit(0 if found["good"] else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="GGUF file or alias; default smollm2")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument(
        "--cases", type=int, default=400, help="different requests; each is asked alone first"
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument(
        "--slots", type=int, default=8, help="texts at a time; fewer than clients, so some wait"
    )
    parser.add_argument("--cancel", type=float, default=0.25, help="share that is cancelled")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--growth", type=float, default=16.0, help="MB that memory may grow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="soak", help="of the result files")
    return parser.parse_args()


def settings(asked: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(asked).items() if name not in ("model", "name")}


def summary(
    asked: argparse.Namespace,
    storm: Storm,
    moments: list[Moment],
    seconds: float,
    busy: int,
    changed: list[int],
) -> dict[str, Any]:
    grown = growth(moments, asked.requests) / 1e6
    lost = asked.requests - storm.done
    bad = lost or busy or changed or storm.different or storm.failed or grown > asked.growth
    return {
        "good": not bad,
        "requests": asked.requests,
        "seconds": seconds,
        "completed_equal": storm.equal,
        "cancelled": storm.cancelled,
        "finished_before_cancelled": storm.finished_first,
        "different": len(storm.different),
        "failed": dict(storm.failed),
        "lost": lost,
        "still_running": busy,
        "changed_afterwards": changed,
        "latency_s": quantiles(storm.latencies_s),
        "resident_mb": [m.resident / 1e6 for m in (moments[0], moments[len(moments) // 2], moments[-1])],
        "grown_mb": grown,
        "growth_limit_mb": asked.growth,
    }


def details(storm: Storm, moments: list[Moment]) -> dict[str, Any]:
    latency = quantiles(storm.latencies_s)
    return {
        "latency_s": None if latency is None else asdict(latency),
        "moments": [asdict(moment) for moment in moments],
        "messages": storm.messages,
        "differences": storm.different[:SHOWN],
    }


def markdown(model: str, found: dict[str, Any]) -> str:
    before, middle, after = found["resident_mb"]
    rows = [
        ["requests", found["requests"]],
        ["seconds", found["seconds"]],
        ["completed, equal to the same request alone", found["completed_equal"]],
        ["completed, different", found["different"]],
        ["cancelled", found["cancelled"]],
        ["of those to be cancelled, faster than that", found["finished_before_cancelled"]],
        ["failed", ", ".join(f"{count} {kind}" for kind, count in found["failed"].items()) or 0],
        ["lost", found["lost"]],
        ["still running afterwards", found["still_running"]],
        ["changed when asked alone again", len(found["changed_afterwards"])],
        ["latency s, p50 / p90 / p99", written(found["latency_s"], 1.0, 2)],
        ["resident MB, start, middle, end", f"{before:.0f}, {middle:.0f}, {after:.0f}"],
        ["grown from second to last fifth, MB", found["grown_mb"]],
    ]
    verdict = "good" if found["good"] else "NOT GOOD"
    return f"# Soak, {model}: {verdict}\n\n" + results.table(["", ""], rows)


if __name__ == "__main__":
    main()
